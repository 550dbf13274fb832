import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.predict import trace as tracing
from autotune.predict import trace_cache, tracer
from autotune.predict.trace import trace_job
from autotune.predict.trace_cache import untraced_note
from autotune.predict.trace_data import BACKWARD, FORWARD, IMPORTED
from autotune.predict.tracer import Untraceable, trace_model
from autotune.problem.job import parse_lora
from autotune.problem.models import ModelSpec, resolve_model
from autotune.rank.model_builder import task_model, transformers_config
from tests.cli_call import call
from tests.conftest import make_job, wait_until
from tests.predict.passes import act_bytes_per_sequence
from tests.predict.recorded import SEQ_LEN, recorded_trace

REFERENCE = json.loads((Path(__file__).parents[2] / "benchmarks/data/activation_traces.json").read_text())


def deep(layers: int, model: str = "tiny-llama", **changes: object) -> ModelSpec:
    spec = resolve_model(model)
    config = {key: value for key, value in spec.config.items() if key != "layer_types"}
    return replace(spec, name=f"{model}-{layers}", config={**config, "num_hidden_layers": layers, **changes})


@pytest.mark.slow
def test_reference_traces_are_met_within_one_per_cent() -> None:
    row = REFERENCE["qwen2.5-0.5b"]
    job = replace(make_job(1, seq_len=row["seq"], precision="bf16"), model=resolve_model("qwen2.5-0.5b"))
    trace = trace_model(job)
    assert sum(trace.parameters) == row["n"]
    assert act_bytes_per_sequence(trace.plain) == pytest.approx(row["act0"], rel=0.01)
    assert act_bytes_per_sequence(trace.of(True)) == pytest.approx(row["act1"], rel=0.01)
    assert sum(trace.plain.flops) == pytest.approx(row["flops0_1"], rel=1e-9)
    assert sum(trace.of(True).flops) == pytest.approx(row["flops1_1"], rel=1e-9)


@pytest.mark.main_path
@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gemma-2"])
def test_two_shallow_traces_tell_a_deep_one_exactly(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = replace(make_job(1, seq_len=16), model=deep(9 if model == "tiny-llama" else 12, model))
    quick = trace_model(job)
    monkeypatch.setattr(tracer, "extrapolation", lambda *_: None)
    whole = trace_model(job)
    for checkpointing in (False, True):
        one, other = quick.of(checkpointing), whole.of(checkpointing)
        assert one.flops == pytest.approx(other.flops)
        assert one.operators == pytest.approx(other.operators)
        for batch in (1, 3, 8):
            for phase in (FORWARD, BACKWARD):
                peaks = [
                    max(
                        f + s * batch + g
                        for f, s, g, p in zip(run.fixed, run.per_sequence, run.gradients, run.phase, strict=True)
                        if p == phase
                    )
                    for run in (one, other)
                ]
                assert peaks[0] == pytest.approx(peaks[1], rel=1e-6)


def test_a_trace_is_cached_by_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path))
    made = trace_job(make_job())
    files = list((tmp_path / "autotune" / "traces").iterdir())
    assert len(files) == 1
    with monkeypatch.context() as patch:
        patch.setattr(tracing, "_run_tracer", lambda *a: pytest.fail("traced again"))
        assert trace_job(make_job(ranks=1)) == made  # ranks do not matter to a trace
        files[0].write_text('{"plain": {}}')
        with pytest.raises(pytest.fail.Exception, match="traced again"):
            trace_job(make_job())


@pytest.mark.slow
def test_a_batch_of_large_images_does_not_keep_the_tracer_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracer_process: None
) -> None:
    """It is made by OpenMP's threads before the tracer forks."""
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS")  # as people have it
    small = make_job(model="tiny-llava", seq_len=512, task="image-text")
    config = {**small.model.config, "vision_config": {**small.model.config["vision_config"], "image_size": 224}}
    assert trace_job(replace(small, model=replace(small.model, config=config)), timeout_seconds=300).exact


class SlowTracer:
    """A tracer's process by a clock of its own."""

    returncode, pid = 0, -1

    def __init__(self, clock: list[float], imported: float, ended: float) -> None:
        self._clock, self._imported, self._ended = clock, imported, ended

    def __call__(self, *_: object, **__: object) -> "SlowTracer":
        return self

    def __enter__(self) -> "SlowTracer":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def communicate(self, asked: str | None = None, timeout: float = 0.0) -> tuple[str, str]:
        if self._clock[0] + timeout >= self._ended:
            return f'{IMPORTED}\n{{"trace": 1}}\n', ""
        self._clock[0] += timeout
        said = f"a warning\n{IMPORTED}\n".encode() if self._clock[0] >= self._imported else None
        raise subprocess.TimeoutExpired("tracer", timeout, output=said)

    def kill(self) -> None:
        self.returncode = -9

    def poll(self) -> int:
        return self.returncode

    def wait(self) -> int:
        return self.returncode


@pytest.mark.parametrize(
    ("imported", "ended", "answer"),
    [
        (1000.0, 1299.0, {"trace": 1}),
        (0.0, 301.0, {"untraceable": "no trace within 300 s"}),
        (1000.0, 1302.0, {"untraceable": "no trace within 300 s"}),
        (1900.0, 2000.0, {"untraceable": "torch and transformers not imported within 1800 s"}),
    ],
)
def test_slow_imports_are_no_reason_against_a_trace(
    imported: float, ended: float, answer: dict[str, object], monkeypatch: pytest.MonkeyPatch, tracer_process: None
) -> None:
    clock = [0.0]
    monkeypatch.setattr(subprocess, "Popen", SlowTracer(clock, imported, ended))
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    assert tracing._ask_tracer(make_job(), [], 300.0, lambda: False) == answer


@pytest.mark.slow
def test_a_tracer_that_is_given_up_leaves_nothing_running() -> None:
    code = (
        "import os, time\nfrom autotune.predict.tracer import _children\n"
        "with _children(1) as pool:\n print(pool.apply(os.getpid), flush=True)\n pool.apply(time.sleep, (120,))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        child = Path("/proc", process.stdout.readline().strip())
        assert child.exists()
        process.kill()

    def ended() -> bool:
        try:
            return "State:\tZ" in (child / "status").read_text()
        except OSError:
            return True

    wait_until(ended, "the tracer's child is gone", seconds=20)


@pytest.mark.slow
def test_a_loss_keeps_what_its_code_keeps() -> None:
    job = make_job(precision="bf16")
    losses = ("chunked", "fused", "shifted16", "shifted-cast", "shifted32")
    kept = {loss: trace_job(job, loss=loss).plain.after_forward[1] for loss in losses}
    logits = job.seq_len * job.model.config["vocab_size"]  # of one sequence
    assert kept["chunked"] <= kept["fused"] < kept["shifted16"] < kept["shifted32"]
    assert kept["shifted16"] < kept["shifted-cast"] <= kept["shifted32"]
    flops = {loss: sum(trace_job(job, loss=loss).plain.flops) for loss in ("own", "chunked")}
    assert flops["chunked"] == pytest.approx(flops["own"], rel=0.1)
    # a copy of 4 bytes an element and log-probabilities of 4, against 2 and 2
    assert kept["shifted32"] - kept["shifted16"] == pytest.approx(4 * logits, rel=0.6)


def test_what_cannot_be_traced_falls_back_to_the_closed_form_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path))
    traced = trace_job(make_job(model="llama-3.2-1b", precision="bf16", seq_len=2048))

    said = json.dumps({"untraceable": "operator nonzero needs values"})
    monkeypatch.setattr(tracing, "_run_tracer", lambda *a: (said, ""))
    monkeypatch.setattr(trace_cache, "cache_key", lambda *arguments: "other")
    closed = trace_job(make_job(model="llama-3.2-1b", precision="bf16", seq_len=2048))
    assert not closed.exact
    assert "nonzero" in closed.note
    assert act_bytes_per_sequence(closed.plain) == pytest.approx(act_bytes_per_sequence(traced.plain), rel=0.35)
    assert sum(closed.plain.flops) == pytest.approx(sum(traced.plain.flops), rel=0.15)
    assert not list(tmp_path.rglob("other*"))  # a fallback is not cached: the next version may trace it


def test_data_dependent_models_are_untraceable(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    class Routed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Embedding(8, 8)
            self.config = type("C", (), {"use_cache": False})()

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> object:
            out = self.inner(input_ids)
            if out.sum().item() > 0:
                out = out * 2
            return type("O", (), {"loss": out.mean()})()

    monkeypatch.setattr(tracer, "_build", lambda job, config: (Routed(), None))
    with pytest.raises(Untraceable):
        trace_model(make_job())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "nosuchthing"},
        {"model_type": "llama", "hidden_size": "wide"},
        {"model_type": "clip"},  # transformers knows it, and has no causal model of it
    ],
)
def test_a_configuration_of_no_model_is_said_in_one_line(changes: dict[str, object]) -> None:
    config = {key: value for key, value in resolve_model("tiny-llama").config.items() if key != "model_type"}
    job = replace(make_job(), model=ModelSpec("odd", {**config, **changes}, "test"))
    with pytest.raises(UserError, match="model odd cannot be built: ") as caught:
        trace_job(job)
    assert "\n" not in str(caught.value)


# -- what needs a GPU ----------------------------------------------------------------------------------------------------


@pytest.fixture
def flash_attn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package `flash_attn` that tracing processes find installed, as a machine with GPUs has it."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn/__init__.py").write_text("__version__ = '2.8.3'\n")
    facts = tmp_path / "flash_attn-2.8.3.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n")
    (facts / "top_level.txt").write_text("flash_attn\n")
    (facts / "RECORD").write_text("flash_attn/__init__.py,,\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


ALSO = [pytest.param(name, marks=pytest.mark.slow) for name in ("flash_attention_3", "flex_attention")]


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["flash_attention_2", *ALSO])
def test_attention_that_needs_a_gpu_is_traced_as_what_keeps_the_same(attention: str) -> None:
    job = make_job(precision="bf16")
    made = trace_job(replace(job, attention=attention))
    assert made.exact
    assert made == trace_job(replace(job, attention="sdpa"))
    assert made != trace_job(replace(job, attention="eager"))


@pytest.mark.slow
def test_an_installed_kernel_that_is_not_for_cpus_ends_no_trace(
    flash_attn: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracer_process: None
) -> None:
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path / "cache"))
    job = make_job(precision="bf16", seq_len=SEQ_LEN)
    assert trace_job(replace(job, attention="flash_attention_2")) == recorded_trace(job)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel",
    [
        "flash_attention_2",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("kernels-community/flash-attn3", "paged|sdpa")),
    ],
)
def test_a_kernel_in_the_models_own_configuration_ends_no_trace(kernel: str) -> None:
    job = make_job(precision="bf16")
    spec = job.model
    asked = replace(job, model=replace(spec, config={**spec.config, "attn_implementation": kernel}))
    made = trace_job(asked)
    assert made.exact
    assert made.plain == trace_job(replace(job, attention="sdpa")).plain


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_rank_builds_the_kernel_that_was_asked_for_in_16_bits(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace's stand-in is the trace's alone."""
    import torch
    from transformers import AutoModelForCausalLM

    asked: dict[str, object] = {}
    monkeypatch.setattr(AutoModelForCausalLM, "from_config", lambda config, **kept: asked.update(kept))
    job = replace(make_job(precision=precision), attention="flash_attention_2")
    task_model(transformers_config(job.model), job)
    assert asked["attn_implementation"] == "flash_attention_2"
    assert asked["dtype"] == {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]


@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3"])
def test_what_computes_in_16_bits_only_is_refused_in_32(attention: str) -> None:
    with pytest.raises(UserError, match=f"--attn {attention} computes in 16 bits: give --precision bf16 or fp16"):
        trace_job(replace(make_job(precision="fp32"), attention=attention))


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libcuda.so.1: cannot open shared object file"),
        AssertionError("Torch not compiled with CUDA enabled"),
        AttributeError("module 'triton' has no attribute 'jit'"),
    ],
)
def test_code_that_needs_what_is_not_here_is_estimated(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(tracer, "_build", fails)
    monkeypatch.setattr(trace_cache, "cache_key", lambda *arguments: "none")
    made = trace_job(make_job())
    assert not made.exact
    assert made.note == untraced_note(f"{type(error).__name__}: {error}")


@pytest.mark.slow
def test_a_model_that_is_built_but_cannot_run_here_is_estimated_by_its_own_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("this kernel is for CUDA")

    monkeypatch.setattr(trace_cache, "cache_key", lambda *arguments: "none")
    job = make_job(lora=parse_lora("r=8"))
    exact = trace_model(job)
    monkeypatch.setattr(tracer, "loss_of", fails)
    made = trace_job(job)
    assert (made.exact, made.note) == (False, untraced_note("RuntimeError: this kernel is for CUDA", counted=True))
    assert "activations and computing times are those of a dense model of its size" in made.note
    assert (made.parameters, made.frozen) == (exact.parameters, exact.frozen)


WORKLOAD = """
import os, torch
def build():
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        raise RuntimeError("0 active drivers")
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4, bias=False))
    model[1].weight.requires_grad = False
    return model, lambda micro_batch: iter(())
"""


@pytest.mark.slow
def test_a_workload_that_insists_on_a_gpu_is_asked_again_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracer_process: None
) -> None:
    (tmp_path / "insists.py").write_text(WORKLOAD)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    job = replace(make_job(), model=ModelSpec("build", {}, "test"), workload="insists:build")
    made = trace_job(job)
    assert (made.exact, made.parameters, made.frozen) == (False, [128, 16], 64)
    assert "0 active drivers" in made.note
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match=r"model build cannot be built here \(RuntimeError: 0 active drivers\)"):
        trace_job(job)


REFUSED = """
import errno
from autotune.rank import sandbox
from autotune.util import linux
def refuse(*arguments):
    raise PermissionError(errno.EPERM, "not in this container")
linux.enter_mount_namespace = linux.check_landlock = refuse
sandbox.main()
"""


@pytest.fixture
def no_protection(monkeypatch: pytest.MonkeyPatch, tracer_process: None) -> None:
    """The kernel offers tracers no sandbox."""
    monkeypatch.setattr(
        "autotune.util.interpreter.contained_command", lambda *words: [sys.executable, "-c", REFUSED, *words[2:]]
    )


def test_own_code_is_traced_without_a_sandbox_only_if_the_user_agrees(
    no_protection: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "TRACER", "this")
    workload = replace(make_job(), workload="mine:make")
    remote = replace(make_job(), model=replace(make_job().model, trust_remote_code=True))
    for job in (workload, remote):
        with pytest.raises(UserError, match=r"^this machine cannot keep .* --unprotected"):
            tracing._ask_tracer(job, [], 60.0, lambda: False)
    for job in (make_job(), replace(workload, unprotected=True)):
        assert tracing._ask_tracer(job, [], 60.0, lambda: False) == {"untraceable": "no answer"}, "it ran"


def test_a_full_temporary_folder_ends_a_plan_in_one_line(
    tracer_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(**_: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/autotune-1")

    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path))
    monkeypatch.setattr("autotune.predict.trace.tempfile.mkdtemp", full)
    monkeypatch.setattr(trace_cache, "cache_key", lambda *arguments: "none")
    code, _, err = call(monkeypatch, capsys, "plan", "--model", "tiny-llama", "--gpu", "a100-80gb")
    assert code == 4
    assert err.splitlines()[-1].startswith("autotune: the disk refuses to be written (No space left on device)")
    assert "Traceback" not in err
