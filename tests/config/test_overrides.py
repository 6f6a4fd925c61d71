"""Values by dotted names and from files: what they are, and what they must not be."""

import pytest

from skipless.config.overrides import MOST_VALUES, load_yaml, parse_overrides
from skipless.errors import UserError


def bomb(levels: int) -> str:
    """A few hundred bytes that stand for 9^levels values."""
    lines = ['a0: &a0 ["lol", "lol", "lol", "lol", "lol", "lol", "lol", "lol", "lol"]']
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines)


def test_aliases_cannot_make_a_file_huge(tmp_path):
    path = tmp_path / "bomb.yaml"
    path.write_text(bomb(30))
    with pytest.raises(UserError, match="values, and a configuration has at most"):
        load_yaml(path)


def test_aliases_are_followed_where_they_are_few(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text("one: &it {lr: 0.1}\ntwo: *it\n")
    assert load_yaml(path) == {"one": {"lr": 0.1}, "two": {"lr": 0.1}}


def test_every_value_is_counted(tmp_path):
    path = tmp_path / "long.yaml"
    path.write_text("x: [" + ", ".join("1" for _ in range(MOST_VALUES)) + "]")
    with pytest.raises(UserError, match="values"):
        load_yaml(path)


@pytest.mark.parametrize("text", ["&a [*a]", "&a {b: *a}", "[" * 100_000, "2024-13-45", "!!python/object:os.system x"])
def test_what_is_no_value_is_said(text):
    with pytest.raises(UserError, match="not valid YAML"):
        parse_overrides([f"x={text}"])
