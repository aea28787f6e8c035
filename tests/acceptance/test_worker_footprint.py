"""What a worker takes: the memory it holds once it is ready."""

import psutil

from tests.support.processes import Worker


def test_a_ready_worker_holds_no_torch_and_little_memory(worker: Worker) -> None:
    process = psutil.Process(worker.process.pid)
    (loaded,) = worker.events("embedder_loaded")
    assert loaded["engine"].startswith("openvino")
    assert not [mapped.path for mapped in process.memory_maps() if "torch" in mapped.path]
    # Weights take twice as much where the processor has no bfloat16.
    assert process.memory_info().rss < (450e6 if "bf16" in loaded["engine"] else 600e6)
    # Nor what exports spans, which nobody has asked for.
    assert not [mapped.path for mapped in process.memory_maps() if "google/_upb" in mapped.path]
