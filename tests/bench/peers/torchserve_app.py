"""TorchServe: an archive with a handler, its batching, one body of bytes a request."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from engine import arguments

HERE = Path(__file__).parent
SCRIPTS = Path(sys.executable).parent


def main() -> None:
    given = arguments()
    store = given.work_dir / "store"
    store.mkdir(parents=True, exist_ok=True)
    archive = [SCRIPTS / "torch-model-archiver", "--model-name=model", "--version=1.0", f"--export-path={store}"]
    archive += [f"--handler={HERE / 'torchserve_handler.py'}", f"--extra-files={HERE / 'engine.py'}"]
    subprocess.run([*archive, f"--serialized-file={given.model}", "--force"], check=True)
    config = given.work_dir / "config.properties"
    config.write_text("".join(f"{key}={value}\n" for key, value in properties(given, store).items()))
    os.environ |= {"THREADS": str(given.threads), "LOG_LOCATION": str(given.work_dir), "TEMP": str(given.work_dir)}
    os.environ["METRICS_LOCATION"] = str(given.work_dir)
    os.environ["PATH"] = f"{SCRIPTS}:{os.environ['PATH']}"
    words = ["torchserve", "--start", "--foreground", "--disable-token-auth", f"--ts-config={config}"]
    words += [f"--model-store={store}", f"--log-config={log_config(given.work_dir)}"]
    os.execv(shutil.which("torchserve"), words)


def properties(given, store: Path) -> dict[str, object]:
    model = {"defaultVersion": True, "marName": "model.mar", "minWorkers": given.workers, "maxWorkers": given.workers}
    model |= {"batchSize": given.max_batch_size, "maxBatchDelay": 1, "responseTimeout": 60}
    return {
        "inference_address": f"http://127.0.0.1:{given.port}",
        "management_address": f"http://127.0.0.1:{free_port()}",
        "metrics_address": f"http://127.0.0.1:{free_port()}",
        "enable_grpc": "false",
        "disable_system_metrics": "true",
        "job_queue_size": 4096,
        "model_store": store,
        "load_models": "model.mar",
        "models": json.dumps({"model": {"1.0": model}}),
    }


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def log_config(folder: Path) -> Path:
    """Without a line a request, which is its default."""
    path = folder / "log4j2.xml"
    path.write_text(
        '<Configuration><Appenders><Console name="out"><PatternLayout pattern="%p %m%n"/></Console></Appenders>'
        '<Loggers><Root level="warn"><AppenderRef ref="out"/></Root></Loggers></Configuration>'
    )
    return path


if __name__ == "__main__":
    main()
