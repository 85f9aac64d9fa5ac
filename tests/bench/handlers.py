"""What a handler costs: the same rows as tensors and through a handler that decodes JSON, in turns of one run, by wrk.

python tests/bench/handlers.py mlp.pt2 [--rounds 5] [--seconds 3] [--handlers 2] [--connections 1,64]

Prints requests/s and p50 of both at each number of connections, and the time that the handler adds. wrk, the server,
its worker and the handlers share the machine's cores.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
from load import http_request
from measure import Speed, wrk
from serve_wrk import Server

from mctl.bundle_format.archive import open_bundle

HANDLER = """
import numpy as np
from mctl.handlers import route

class Numbers:
    @route("POST", "/numbers")
    async def numbers(self, request, model):
        outputs = await model(x=np.array((await request.json())["x"], np.float32))
        return {"y": next(iter(outputs.values())).tolist()}
"""


def requests(bundle: Path) -> dict[str, list[bytes]]:
    """One row a request, as JSON: tensors of the protocol, and what the handler takes."""
    with open_bundle(bundle) as archive:
        name, contract = archive.manifest.name, archive.manifest.contract
    rows = np.random.default_rng(0).normal(size=(16, 1, contract.inputs[0].shape[1])).astype(np.float32)
    headers = {"content-type": "application/json"}
    made: dict[str, list[bytes]] = {"tensors": [], "handler": []}
    for row in rows:
        tensor = {"name": contract.inputs[0].name, "shape": row.shape, "datatype": "FP32", "data": row.tolist()}
        infer = json.dumps({"inputs": [tensor]}).encode()
        made["tensors"].append(http_request(f"/v2/models/{name}/infer", infer, headers))
        made["handler"].append(http_request("/numbers", json.dumps({"x": row.tolist()}).encode(), headers))
    return made


def median(speeds: list[Speed], what: str) -> float:
    return statistics.median(getattr(speed, what) for speed in speeds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--handlers", type=int, default=2)
    parser.add_argument("--connections", default="1,64")
    given = parser.parse_args()
    sent = requests(given.bundle)
    with tempfile.TemporaryDirectory() as folder:
        handler = Path(folder) / "numbers.py"
        handler.write_text(HANDLER)
        words = ["--threads=1", f"--handler={handler}", f"--handlers={given.handlers}"]
        server = Server(given.bundle, [*words, f"--handler-python={sys.executable}"])
        port = int(server.url.rpartition(":")[2])
        for connections in map(int, given.connections.split(",")):
            speeds: dict[str, list[Speed]] = {"tensors": [], "handler": []}
            for _ in range(given.rounds):
                for way, cases in sent.items():
                    speeds[way].append(wrk(port, cases, connections, given.seconds, set(os.sched_getaffinity(0))))
            for way, found in speeds.items():
                failed = sum(speed.refused + speed.lost for speed in found)
                rate, p50 = median(found, "rate"), median(found, "p50_us")
                print(f"{connections} connections, {way}: {rate:.0f} requests/s, p50 {p50:.0f} us, {failed} failed")
            added = [b.p50_us - a.p50_us for a, b in zip(speeds["tensors"], speeds["handler"], strict=True)]
            print(f"{connections} connections: the handler adds {statistics.median(added):.0f} us")
        server.stop()


if __name__ == "__main__":
    main()
