"""A web server that writes with an exported model, token by token as they come.

pip install -c constraints.txt '.[hf]' fastapi uvicorn
python examples/serve.py exported 8000          # a page to write in, at http://localhost:8000
curl -N localhost:8000/generate -H 'content-type: application/json' -d '{"prompt": "def ", "max_new_tokens": 40}'
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from threading import BoundedSemaphore, Event, Thread
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from pydantic import AfterValidator, BaseModel, Field
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteriaList, TextIteratorStreamer

from skipless import hf  # noqa: F401  (makes the Auto classes know its models)

AT_ONCE = 4
"""Answers that are written at a time: each has a cache in memory. Whoever comes then is told to come again."""

LARGEST_BODY = 2**20
"""Bytes of a request."""


PAGE = Path(__file__).with_suffix(".html")
"""What a browser is shown."""

POLICY = "default-src 'none'; img-src data:; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
"""What that page may load: nothing but answers."""


def whole_characters(text: str) -> str:
    """JSON can spell half a character, which no tokeniser takes."""
    text.encode()
    return text


class Request(BaseModel):
    """What is asked for."""

    prompt: Annotated[str, AfterValidator(whole_characters)] = Field(min_length=1, max_length=100_000)
    max_new_tokens: int = Field(40, ge=1, le=4096)
    temperature: float = Field(0.0, ge=0, le=100, allow_inf_nan=False, description="0 takes the likeliest token.")


class LimitBody:
    """Refuses a request that is too large before it is read."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """An ASGI application around another."""
        read = 0

        async def counted() -> Any:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > LARGEST_BODY:
                raise HTTPException(413, f"a request has at most {LARGEST_BODY:,} bytes")
            return message

        await self.app(scope, counted, send)


def make_app(exported: str | Path) -> FastAPI:
    """The server for a folder of `skipless export`."""
    app = FastAPI()
    app.add_middleware(LimitBody)
    model = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    places = app.state.places = BoundedSemaphore(AT_ONCE)

    @app.exception_handler(RequestValidationError)
    def refuse(_: Any, error: RequestValidationError) -> JSONResponse:
        # without what was sent: it may be what JSON has no word for
        return JSONResponse({"detail": [{"loc": one["loc"], "msg": one["msg"]} for one in error.errors()]}, 422)

    @app.get("/")
    def page() -> HTMLResponse:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers={"Content-Security-Policy": POLICY})

    @app.post("/generate")
    def generate(request: Request) -> StreamingResponse:
        inputs = tokenizer(request.prompt, return_tensors="pt")
        room = model.config.max_seq_len - inputs["input_ids"].shape[1]
        if room < 1:
            raise HTTPException(422, f"the prompt is longer than {model.config.max_seq_len - 1} tokens")
        how = {"do_sample": True, "temperature": request.temperature} if request.temperature else {"do_sample": False}
        if not places.acquire(blocking=False):
            raise HTTPException(503, f"{AT_ONCE} answers are being written; come again", {"Retry-After": "1"})
        return StreamingResponse(write(inputs, min(request.max_new_tokens, room), how), media_type="text/plain")

    def write(inputs: dict, count: int, how: dict) -> Iterator[str]:
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        gone = Event()  # whoever asked may hang up before the end
        stop = StoppingCriteriaList([lambda ids, scores, **_: gone.is_set()])

        def work() -> None:
            try:
                model.generate(**inputs, **how, max_new_tokens=count, streamer=streamer, stopping_criteria=stop)
            finally:
                places.release()
                streamer.end()  # also where it fails, or the answer would never end

        Thread(target=work, daemon=True).start()  # now: the place is free again even if nobody reads the answer

        def pieces() -> Iterator[str]:
            try:
                yield from (piece for piece in streamer if piece)
            finally:
                gone.set()

        return pieces()

    return app


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else "exported"
    uvicorn.run(make_app(folder), host="127.0.0.1", port=int(sys.argv[2]) if len(sys.argv) > 2 else 8000)
