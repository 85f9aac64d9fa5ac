"""Raw requests in, answers out: Python between clients and a compiled model, in processes of its own."""

from .answers import Response
from .api import BadRequest, Context, PlainRequest, Refused, Request, route
from .models import Model, Models

__all__ = ["BadRequest", "Context", "Model", "Models", "PlainRequest", "Refused", "Request", "Response", "route"]
