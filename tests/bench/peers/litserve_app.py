"""LitServe: its batching, one body of bytes a request."""

from typing import Annotated

import litserve
from engine import Engine, arguments
from fastapi import Depends, Request, Response


async def body_of(request: Request) -> bytes:
    return await request.body()


class Api(litserve.LitAPI):
    def __init__(self, model: str, threads: int, **options: object) -> None:
        super().__init__(api_path="/infer", **options)
        self.model, self.threads = model, threads

    def setup(self, device: str) -> None:
        self.engine = Engine(self.model, self.threads)

    def decode_request(self, request: Annotated[bytes, Depends(body_of)]) -> bytes:
        return request

    def batch(self, inputs: list[bytes]) -> list[bytes]:
        return inputs

    def predict(self, inputs: list[bytes]) -> list[bytes]:
        return self.engine.rows(inputs)

    def unbatch(self, output: list[bytes]) -> list[bytes]:
        return output

    def encode_response(self, output: bytes) -> Response:
        return Response(output, media_type="application/octet-stream")


if __name__ == "__main__":
    given = arguments()
    api = Api(str(given.model), given.threads, max_batch_size=given.max_batch_size, batch_timeout=0.001)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=given.workers, fast_queue=True)
    server.run(port=given.port, log_level="warning", generate_client_file=False)
