"""A handler as it was written for TorchServe. Needs `vocabulary.json` and `index_to_name.json` beside it."""

import json
import os

import torch
from ts.torch_handler.base_handler import BaseHandler


class WordsHandler(BaseHandler):
    def initialize(self, context):
        super().initialize(context)
        path = os.path.join(context.system_properties["model_dir"], "vocabulary.json")  # noqa: PTH118
        with open(path) as file:  # noqa: PTH123
            self.vocabulary = json.load(file)

    def preprocess(self, data):
        texts = [item.get("data") or item.get("body") for item in data]
        texts = [text.decode() if isinstance(text, bytes | bytearray) else text for text in texts]
        rows = [[self.vocabulary.get(word, 0) for word in text.lower().split()] for text in texts]
        longest = max(map(len, rows))
        return torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=self.device)

    def postprocess(self, outputs):
        return [{"label": self.mapping[str(at)]} for at in outputs.argmax(dim=1).tolist()]
