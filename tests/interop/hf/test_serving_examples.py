"""The examples that no other test runs; test_training.py runs those for Trainer and LoRA."""

import http.client
import json
import socket
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import uvicorn
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import block_in_your_model, serve


def test_a_block_in_ones_own_model_learns():
    assert block_in_your_model.main(steps=50) > 0.3  # 0.1 is a guess


@pytest.fixture(scope="module")
def server(exported):
    """The example's server on a port of this machine."""
    listener = socket.create_server(("127.0.0.1", 0))
    app = serve.make_app(exported)
    config = uvicorn.Config(app, log_level="error")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
    thread.start()
    while not running.started:
        time.sleep(0.01)
    yield SimpleNamespace(port=listener.getsockname()[1], places=app.state.places)
    running.should_exit = True
    thread.join()


def ask(server, **request):
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/generate", json.dumps(request), {"content-type": "application/json"})
    return connection.getresponse()


def pieces(response):
    """The body as it comes, a piece for each chunk on the wire."""
    found = []
    while piece := response.read1():
        found.append(piece.decode())
    return found


def test_serving_streams_what_the_model_writes(server, exported):
    prompt = "def alpha(beta, gamma):\n"
    response = ask(server, prompt=prompt, max_new_tokens=40)
    assert (response.status, response.getheader("transfer-encoding")) == (200, "chunked")
    found = pieces(response)
    assert len(found) > 1
    model, tokenizer = AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "".join(found) == tokenizer.decode(ids, skip_special_tokens=True)


def test_serving_refuses_what_it_cannot_do(server):
    assert ask(server, prompt="").status == 422
    assert ask(server, prompt="def ", max_new_tokens=0).status == 422
    assert ask(server, prompt="word " * 400).status == 422
    assert ask(server, prompt="x" * 100_001).status == 422
    assert ask(server, prompt="x" * 2**21).status == 413
    assert ask(server, prompt="half \ud800 a character").status == 422
    for number in (float("nan"), float("inf"), -1.0):
        assert ask(server, prompt="def ", temperature=number).status == 422
    assert (
        ask(server, prompt="def ", max_new_tokens=4000, temperature=0.9).status == 200
    )  # up to the end of the context


def test_serving_has_places_for_so_many(server):
    """Each answer takes memory, so whoever comes when all places are taken is told to come again."""
    with ExitStack() as stack:
        for _ in range(serve.AT_ONCE):
            assert server.places.acquire(timeout=30)  # as many as are writing
            stack.callback(server.places.release)
        refused = ask(server, prompt="def ")
        assert (refused.status, refused.getheader("retry-after")) == (503, "1")
    for _ in range(2 * serve.AT_ONCE):  # every answer gives its place back
        response = ask(server, prompt="def ", max_new_tokens=2)
        assert response.status == 200
        response.read()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
def test_the_page_writes(server, browser, scheme, width):
    """In a browser: the answer grows as it is written, nothing is said on the console, nothing is asked of others."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page, said, here = context.new_page(), [], f"http://127.0.0.1:{server.port}/"
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: request.url.startswith((here, "data:")) or said.append(request.url))
    response = page.goto(here)
    assert "default-src 'none'" in response.headers["content-security-policy"]
    page.get_by_label("Prompt").fill("def alpha(beta, gamma):\n")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Tokens to write").fill("40")
    page.get_by_role("button", name="Write").click()
    page.get_by_text("Done.").wait_for()
    expected = "".join(pieces(ask(server, prompt="def alpha(beta, gamma):\n", max_new_tokens=40)))
    assert page.locator("#answer").text_content() == "def alpha(beta, gamma):\n" + expected
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.get_by_label("Prompt").fill("word " * 400)
    page.get_by_role("button", name="Write").click()
    page.get_by_text("the prompt is longer than 127 tokens").wait_for()
    assert [text for text in said if "422" not in text] == []  # the browser reports what was refused
    context.close()
