"""A bundle inside a Python web program: concurrent requests are run together by a DynamicBatcher.

MCTL_BUNDLE=bundle.pt2 uvicorn --app-dir samples starlette_app:app
curl localhost:8000/predict -d '{"x": [[0.1, 0.2, …]]}'
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from mctl.bundle_format.errors import ClosedError, ContractError, DeadlineError, MctlError, QueueFullError
from mctl.runner.batcher import DynamicBatcher
from mctl.runner.session import Session, load

STATUS = {ContractError: 400, QueueFullError: 503, ClosedError: 503, DeadlineError: 504}


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    with await run_in_threadpool(load, os.environ.get("MCTL_BUNDLE", "bundle.pt2"), threads=1) as session:
        async with DynamicBatcher(session, max_queue_delay_us=1000) as batcher:
            app.state.session, app.state.batcher = session, batcher
            yield


def arrays_from(body: object, session: Session) -> dict[str, np.ndarray]:
    """JSON lists as arrays of the dtypes that the contract says; names are left to the batcher's check."""
    if not isinstance(body, dict):
        raise ContractError("the body is no JSON object of inputs by name")
    dtypes = {declared.name: declared.dtype for declared in session.contract.inputs}
    try:
        return {name: np.array(value, dtype=dtypes.get(name)) for name, value in body.items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise ContractError(f"an input is no array of numbers: {error}") from error


async def predict(request: Request) -> JSONResponse:
    try:
        body = await request.json()
    except ValueError:
        return JSONResponse({"error": "the body is not JSON"}, 400)
    try:
        outputs = await request.app.state.batcher(**arrays_from(body, request.app.state.session))
    except MctlError as error:
        return JSONResponse({"error": error.message}, STATUS.get(type(error), 500))
    return JSONResponse({name: array.tolist() for name, array in outputs.items()})


app = Starlette(routes=[Route("/predict", predict, methods=["POST"])], lifespan=lifespan)
