"""Small models as `save_pretrained` writes them: random weights, and tokenizers that are trained here."""

import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
)

_TEXT = "the a cat dog sits runs on under mat tree quickly slowly and or big small red blue house river sees hears"
WORDS = _TEXT.split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 40,
}  # fmt: skip


def sentences(count: int, seed: int = 0, longest: int = 12) -> list[str]:
    """Words in any order, with some that no tokenizer here has seen."""
    draw = np.random.default_rng(seed)
    words = [*WORDS, "Zürich", "naïve", "cats", "don't", "x1"]
    return [" ".join(draw.choice(words, draw.integers(1, longest))) for _ in range(count)]


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(sentences(400, 1), trainers.WordPieceTrainer(vocab_size=120, special_tokens=SPECIAL))
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", made.token_to_id("[CLS]")), ("[SEP]", made.token_to_id("[SEP]"))],
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=40, **names)


def _sharpened(model: torch.nn.Module) -> torch.nn.Module:
    """Random weights that are large enough for answers to differ clearly."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


def text_folder(folder: Path, task: str) -> Path:
    """For text-embedding as a plain folder; `sentence_folder` has the files of sentence-transformers."""
    known = tokenizer()
    labels = {"text-classification": ["bad", "fine", "good"], "token-classification": ["O", "B-X", "I-X", "B-Y", "I-Y"]}
    config = BertConfig(vocab_size=len(known), id2label=dict(enumerate(labels.get(task, []))) or None, **SMALL)
    kind = {"text-classification": BertForSequenceClassification, "token-classification": BertForTokenClassification}
    model = _sharpened(kind.get(task, BertModel)(config))
    model.save_pretrained(folder)
    known.save_pretrained(folder)
    return folder


def sentence_folder(folder: Path, pooling: object = "mean", longest: int = 16, normalize: bool = True) -> Path:
    """With the files of sentence-transformers, as 6.2 writes them; `pooling` as a dict: as 2.x did."""
    text_folder(folder, "text-embedding")
    kinds = ["base.modules.transformer.Transformer", "sentence_transformer.modules.pooling.Pooling"]
    kinds += ["base.modules.normalize.Normalize"] if normalize else []
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": at, "name": str(at), "path": paths[at], "type": f"sentence_transformers.{kind}"}
        for at, kind in enumerate(kinds)
    ]
    mode = pooling if isinstance(pooling, dict) else {"embedding_dimension": 32, "pooling_mode": pooling}
    for name, content in {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": longest, "do_lower_case": False},
        "1_Pooling/config.json": mode,
        "2_Normalize/config.json": {},
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


def image_folder(folder: Path) -> Path:
    config = ViTConfig(
        image_size=24, patch_size=8, num_channels=3, id2label={0: "cat", 1: "dog", 2: "tree", 3: "house"},
        **{name: value for name, value in SMALL.items() if name != "max_position_embeddings"},
    )  # fmt: skip
    _sharpened(ViTForImageClassification(config)).save_pretrained(folder)
    settings = {
        "image_processor_type": "ViTImageProcessor", "do_resize": True, "size": {"height": 24, "width": 24},
        "resample": 2, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
        "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7],
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder
