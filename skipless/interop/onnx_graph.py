"""An ONNX graph under construction: nodes in order, constants, named inputs and outputs."""

from typing import Any

import numpy as np

OPSET = 21
MICROSOFT = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""

TYPES = {"float32": 1, "int8": 3, "int32": 6, "int64": 7}
"""ONNX's numbers of types."""

Axes = list[int | str]
"""The sizes of an input or output; a name stands for a size that is known only when the graph runs."""


class Graph:
    """Nodes and constants; each method that adds something returns the name of what it makes.

    A graph with a `parent` is a branch of one of the parent's nodes: it sees the parent's names and keeps its constants
    there.
    """

    def __init__(self, parent: "Graph | None" = None) -> None:
        self.parent = parent
        self.root: Graph = self if parent is None else parent.root
        self.nodes: list[Any] = []
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.constants: list[Any] = []
        self._small: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._counter = 0

    def fresh(self, what: str) -> str:
        """A name that is not there yet."""
        self.root._counter += 1
        return f"{what.lower()}_{self.root._counter}"

    def constant(self, value: Any, dtype: Any = np.float32, name: str = "constant") -> str:
        """A constant; a small one that is there already is not stored again."""
        from onnx import numpy_helper

        array = np.ascontiguousarray(np.asarray(value, dtype=dtype))
        root, key = self.root, (str(array.dtype), array.shape, array.tobytes() if array.size <= 16 else b"")
        if array.size <= 16 and key in root._small:
            return root._small[key]
        made = self.fresh(name)
        root.constants.append(numpy_helper.from_array(array, made))
        if array.size <= 16:
            root._small[key] = made
        return made

    def add(self, op: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """A node with one output."""
        return self.add_many(op, 1, *inputs, domain=domain, **attributes)[0]

    def add_many(
        self, op: str, outputs: int | list[str], *inputs: str, domain: str = "", **attributes: Any
    ) -> list[str]:
        """A node with several outputs, or with outputs of given names."""
        from onnx import helper

        names = [self.fresh(op) for _ in range(outputs)] if isinstance(outputs, int) else outputs
        self.nodes.append(helper.make_node(op, list(inputs), names, domain=domain, **attributes))
        return names

    def choose(self, condition: str, yes: "Graph", no: "Graph") -> str:
        """The one output of the branch that a condition takes."""
        branches = {"then_branch": yes.as_proto("then"), "else_branch": no.as_proto("else")}
        return self.add("If", condition, **branches)

    def input(self, name: str, dtype: str, axes: Axes) -> str:
        """An input."""
        self.inputs.append(_described(name, dtype, axes))
        return name

    def output(self, name: str, dtype: str, axes: Axes | None) -> str:
        """Declare something as an output."""
        self.outputs.append(_described(name, dtype, axes))
        return name

    def as_proto(self, name: str) -> Any:
        """The graph in ONNX's own form."""
        from onnx import helper

        return helper.make_graph(self.nodes, name, self.inputs, self.outputs, self.constants)

    def model(self) -> Any:
        """The whole model."""
        from onnx import helper

        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(
            self.as_proto("decoder"), opset_imports=opsets, ir_version=10, producer_name="skipless"
        )


def _described(name: str, dtype: str, axes: Axes | None) -> Any:
    from onnx import helper

    return helper.make_tensor_value_info(name, TYPES[dtype], axes)
