"""A pipeline of one model: text in, a label with its score out. Needs `tokenizer.json` beside it.

mctl compile program.pt2 --handler samples/handlers/sentiment.py --asset tokenizer.json
"""

import numpy as np
from tokenizers import Tokenizer

from mctl.handlers import BadRequest, Context, Model, Request, route

requirements = ["tokenizers"]
LABELS = ("negative", "positive")


class Sentiment:
    def __init__(self, context: Context) -> None:
        self.tokenizer = Tokenizer.from_file(str(context.assets / "tokenizer.json"))

    @route("POST", "/classify")
    async def classify(self, request: Request, model: Model) -> dict[str, object]:
        said = await request.json()
        if not isinstance(said, dict) or not isinstance(said.get("text"), str):
            raise BadRequest('send `{"text": "…"}`')
        ids = self.tokenizer.encode(said["text"]).ids
        logits = (await model(input_ids=[ids], attention_mask=[[1] * len(ids)]))["logits"][0]
        shares = np.exp(logits - logits.max())
        best = int(logits.argmax())
        return {"label": LABELS[best], "score": shares[best] / shares.sum()}
