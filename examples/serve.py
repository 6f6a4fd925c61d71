"""A web server that writes with an exported model, token by token as they come.

pip install 'skipless[hf]' fastapi uvicorn
python examples/serve.py exported 8000
curl -N localhost:8000/generate -H 'content-type: application/json' -d '{"prompt": "def ", "max_new_tokens": 40}'
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteriaList, TextIteratorStreamer

import skipless  # noqa: F401  (makes the Auto classes know its models)


class Request(BaseModel):
    """What is asked for."""

    prompt: str = Field(min_length=1)
    max_new_tokens: int = Field(40, ge=1, le=4096)
    temperature: float = Field(0.0, ge=0, description="0 takes the likeliest token.")


def make_app(exported: str | Path) -> FastAPI:
    """The server for a folder of `skipless export`."""
    app = FastAPI()
    model = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)

    @app.post("/generate")
    def generate(request: Request) -> StreamingResponse:
        inputs = tokenizer(request.prompt, return_tensors="pt")
        room = model.config.max_seq_len - inputs["input_ids"].shape[1]
        if room < 1:
            raise HTTPException(422, f"the prompt is longer than {model.config.max_seq_len - 1} tokens")
        how = {"do_sample": True, "temperature": request.temperature} if request.temperature else {"do_sample": False}
        return StreamingResponse(write(inputs, min(request.max_new_tokens, room), how), media_type="text/plain")

    def write(inputs: dict, count: int, how: dict) -> Iterator[str]:
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        gone = Event()  # whoever asked may hang up before the end
        stop = StoppingCriteriaList([lambda ids, scores, **_: gone.is_set()])

        def work() -> None:
            try:
                model.generate(**inputs, **how, max_new_tokens=count, streamer=streamer, stopping_criteria=stop)
            finally:
                streamer.end()  # also where it fails, or the answer would never end

        Thread(target=work, daemon=True).start()
        try:
            yield from (piece for piece in streamer if piece)
        finally:
            gone.set()

    return app


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else "exported"
    uvicorn.run(make_app(folder), host="127.0.0.1", port=int(sys.argv[2]) if len(sys.argv) > 2 else 8000)
