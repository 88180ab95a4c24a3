"""vLLM's worker with our model runner: `--worker-cls dlite.vllm_plugin.worker.Worker`."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from dlite.vllm_plugin import check_version, register

check_version()
register()

from vllm.platforms import current_platform  # noqa: E402

from dlite.vllm_plugin import patches  # noqa: E402

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker

    from dlite.vllm_plugin.runner import CPURunner

    class Worker(CPUWorker):
        def init_device(self) -> None:
            with patches.cpu_model_runner(CPURunner):
                super().init_device()

        def compile_or_warm_up_model(self) -> Any:
            times = super().compile_or_warm_up_model()
            self.model_runner.measure_steps()
            return times

else:
    from vllm.v1.worker.gpu_worker import Worker as GPUWorker

    from dlite.vllm_plugin.runner import GPURunner

    class Worker(GPUWorker):
        def _make_model_runner(self) -> Any:
            return GPURunner(self.vllm_config, self.device)

        def compile_or_warm_up_model(self) -> Any:
            times = super().compile_or_warm_up_model()
            self.model_runner.measure_steps()
            return times
