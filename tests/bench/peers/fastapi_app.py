"""FastAPI and onnxruntime as people write it by hand: bytes in, bytes out, no batching."""

import os

import uvicorn
from engine import Engine, arguments
from fastapi import FastAPI, Request, Response

app = FastAPI()
engine = Engine(os.environ["MODEL"], int(os.environ["THREADS"])) if "MODEL" in os.environ else None


@app.post("/infer")
async def infer(request: Request) -> Response:
    [answer] = engine.rows([await request.body()])
    return Response(answer, media_type="application/octet-stream")


if __name__ == "__main__":
    given = arguments()
    os.environ |= {"MODEL": str(given.model), "THREADS": str(given.threads)}
    uvicorn.run("fastapi_app:app", port=given.port, workers=given.workers, log_level="warning", access_log=False)
