"""A streaming answer: each line of a text is classified, and told as soon as it is. Needs `tokenizer.json`.

curl -N --data-binary @text.txt -H 'content-type: text/plain' http://127.0.0.1:8000/lines
"""

from collections.abc import AsyncIterator

from tokenizers import Tokenizer

from mctl.handlers import Context, Model, Request, route

requirements = ["tokenizers"]


class Lines:
    def __init__(self, context: Context) -> None:
        self.tokenizer = Tokenizer.from_file(str(context.assets / "tokenizer.json"))

    @route("POST", "/lines")
    async def lines(self, request: Request, model: Model) -> AsyncIterator[dict[str, object]]:
        for number, line in enumerate((await request.text()).splitlines(), 1):
            ids = self.tokenizer.encode(line).ids
            if ids:
                logits = (await model(input_ids=[ids], attention_mask=[[1] * len(ids)]))["logits"][0]
                yield {"line": number, "class": int(logits.argmax())}
