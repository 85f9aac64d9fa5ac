"""A pipeline of two models: the handler's own finds candidates, `reranker` compares each with the query.

Needs `tokenizer.json` (of both models) and `documents.txt`, one a line.

mctl serve embedder.pt2 reranker.pt2 --handler embedder=samples/handlers/search.py
"""

import asyncio

import numpy as np
from tokenizers import Tokenizer

from mctl.handlers import BadRequest, Context, Model, Models, Request, route

requirements = ["tokenizers"]
CANDIDATES = 8


class Search:
    def __init__(self, context: Context) -> None:
        self.tokenizer = Tokenizer.from_file(str(context.assets / "tokenizer.json"))
        self.documents = (context.assets / "documents.txt").read_text(encoding="utf-8").splitlines()
        self.vectors: np.ndarray | None = None

    @route("POST", "/search")
    async def search(self, request: Request, model: Model, models: Models) -> list[dict[str, object]]:
        said = await request.json()
        if not isinstance(said, dict) or not isinstance(said.get("query"), str):
            raise BadRequest('send `{"query": "…"}`')
        query = said["query"]
        if self.vectors is None:  # once: their calls share batches
            self.vectors = np.stack(await asyncio.gather(*(self.embed(model, text) for text in self.documents)))
        nearest = np.argsort(-(self.vectors @ await self.embed(model, query)), kind="stable")[:CANDIDATES]
        found = [self.documents[at] for at in nearest]
        scores = await asyncio.gather(*(self.compare(models["reranker"], query, text) for text in found))
        order = np.argsort(-np.array(scores), kind="stable")
        return [{"document": found[at], "score": scores[at]} for at in order]

    async def embed(self, model: Model, text: str) -> np.ndarray:
        ids = self.tokenizer.encode(text).ids
        return (await model(input_ids=[ids], attention_mask=[[1] * len(ids)]))["embedding"][0]

    async def compare(self, reranker: Model, query: str, text: str) -> float:
        pair = self.tokenizer.encode(query, text)
        inputs = {"input_ids": [pair.ids], "attention_mask": [pair.attention_mask], "token_type_ids": [pair.type_ids]}
        return float((await reranker.call(inputs))["logits"][0, 0])
