"""What the tests share. Trials run on real CPU ranks; nothing here stands in for DeepSpeed.

Any test passes alone, in random order and beside a second worker. Whatever is dear to make is a fixture of one of
the scopes below, and a test leaves it as it found it:

- `bench`, `scripts`: each a fork server, one of a kind for all tests that use it;
- `finished_study` (tests/test_end_to_end.py): a study that was killed, resumed, interrupted and finished;
- `traces_of_this_run`: a cache that all tests of a run fill and read.

pytest-xdist makes a session's fixtures once a worker. Files whose tests share a dear one therefore run in one worker:
`DEAR`. What takes long begins first, so that both workers end at the same time.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import io
import json
import os
import socket
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_randomly
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["OMP_NUM_THREADS"] = "1"  # of every process that tests start: two workers share the cores
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # containers set it: every process would compile all modules anew
# Trainings without autotune, too, build DeepSpeed's ops with this environment's ninja: another one's takes what is built for
# stale, and from then on each builds it anew whenever the other has.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])

from autotune.commands.request import Request
from autotune.commands.script_probe import Probe, StartupDeadline, probe
from autotune.commands.setup import Setup
from autotune.executors import local, machine
from autotune.executors.base import MeasureSpec
from autotune.executors.local import Deadlines, LocalExecutor, LocalSession
from autotune.executors.machine import trial_sandbox
from autotune.predict import trace as tracing
from autotune.problem import nvml
from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH, Candidate
from autotune.problem.hardware import Hardware, detect
from autotune.problem.job import Job, Script
from autotune.problem.models import resolve_model
from autotune.problem.outcome import Outcome
from autotune.problem.space import load_space
from autotune.rank.sandbox import Sandbox
from autotune.script.profile import job_of, unknown_job
from autotune.util.units import MIB
from autotune.workers.launchers import ForkLauncher
from tests import fake_driver

pytest_randomly.entrypoint_reseeds = []  # DeepSpeed's seeds its accelerator before each test: its import takes four seconds

SCRIPTS = Path(__file__).parent / "scripts"
SHARED_PAGES = "shared_pages"  # a module there
DEAR = {  # file: what its tests share, or None where each takes long by itself; the longest first
    "tests/executors/test_local.py": "bench",
    "tests/executors/test_local_knobs.py": "bench",
    "tests/executors/cluster/test_transports_ssh.py": "hosts",
    "tests/executors/cluster/test_transports_slurm.py": "slurm",
    "tests/executors/cluster/test_ray_transport.py": "ray",
    "tests/rank/test_workload_tasks.py": "bench",
    "tests/rank/test_workload.py": "bench",
    "tests/predict/test_zero_memory_live.py": "bench",
    "tests/test_scripts.py": "scripts",
    "tests/test_cases.py": "scripts",
    "tests/test_ways.py": "scripts",
    "tests/test_certificates.py": "scripts",
    "tests/test_early_variables.py": "scripts",
    "tests/test_users_files.py": "scripts",
    "tests/sandbox/test_trials.py": "scripts",
    "tests/test_launchers.py": "scripts",
    "tests/test_printed_forms.py": "scripts",
    "tests/test_public_scripts.py": "scripts",
    "tests/test_wheel.py": "wheel",
    "tests/test_end_to_end.py": "finished_study",
    "tests/results/test_export_loaded.py": "trained",
    "tests/results/test_plan.py": "plan",
    "tests/benchmarks/test_gpu_acceptance.py": "rehearsed",
    "tests/rank/hooks/test_accelerate.py": "parent",
    "tests/rank/hooks/test_deepspeed_auxiliary_engines.py": "parent",
    "tests/rank/hooks/test_deepspeed.py": "parent",
    "tests/rank/hooks/test_deepspeed_trace.py": "parent",
    "tests/rank/hooks/test_deepspeed_engine_choice.py": "parent",
    "tests/rank/hooks/test_deepspeed_ops.py": "parent",
    "tests/rank/hooks/test_process_group.py": "parent",
    "tests/rank/hooks/test_transformers_resuming.py": "parent",
    "tests/rank/hooks/test_transformers_saving.py": "parent",
    "tests/rank/hooks/test_transformers.py": "parent",
    "tests/rank/hooks/test_deepspeed_zero_init.py": "parent",
    "tests/rank/test_hub_config.py": "parent",
    "tests/rank/test_model_rank.py": "parent",
    "tests/rank/test_script_rank.py": "parent",
    "tests/rank/test_train_rank.py": "parent",
    "tests/rank/test_torch_engine.py": "parent",
    "tests/test_documents.py": "sources",
    "tests/test_architecture.py": "sources",
    "tests/test_encoding.py": "sources",
    "tests/gpu/test_cuda.py": "gpu",  # one test at a time has the device
    "tests/test_readme.py": None,
    "tests/benchmarks/test_small_forms.py": None,
    "tests/benchmarks/test_faults.py": "faults",  # one at a time looks for what is left on the machine
    "tests/golden/test_golden.py": None,
    "tests/test_guarded.py": None,
    "tests/commands/test_run_tasks.py": None,
    "tests/commands/test_run_stopped_while_building.py": None,
    "tests/workers/test_jit_ops_building.py": None,
    "tests/workers/test_group.py": None,
    "tests/predict/test_trace.py": None,
    "tests/predict/test_tracer_depth_exact.py": None,
}

# Hypothesis fails a test by seconds on a clock; machines are shared and slow at times.
settings.register_profile("quick", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=25)
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=150)
settings.register_profile(  # `make mutants`: thousands of short runs that must not differ by chance
    "mutants", settings.get_profile("quick"), derandomize=True, max_examples=25, database=None
)
settings.load_profile("quick")


def has_cuda() -> bool:
    if not nvml.all_cards():  # spares machines without a GPU the import
        return False
    import torch

    return torch.cuda.is_available()


SERVERS = {"bench", "scripts", "parent"}  # fixtures that start a fork server: five seconds, once a worker


def mark_rest_slow(items: Sequence[pytest.Item]) -> None:
    """Of a test with the marker `few(n)`, keep n parameter sets, spread evenly over all, and mark the others as slow."""
    sets: dict[str, list[Any]] = {}
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            sets.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same in sets.values():
        same.sort(key=lambda item: [*item.callspec.indices.values()])  # as written; pytest-randomly has shuffled them
        (n,) = same[0].get_closest_marker("few").args
        kept = {i * len(same) // n for i in range(n)}
        for at, item in enumerate(same):
            if at not in kept:
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_rest_slow(items)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)  # a slow one that begins last is waited for
    for item in items:
        if item.get_closest_marker("slow"):
            item.user_properties.append(("slow", ""))  # for .ci/junit.py
        used = SERVERS & set(getattr(item, "fixturenames", ()))
        group = DEAR.get(item.nodeid.partition("::")[0])
        assert not used or group, f"{item.nodeid} uses {used.pop()}: give its file a line in DEAR"
    if any(item.get_closest_marker("gpu") for item in items) and not has_cuda():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))


def pytest_collection(session: pytest.Session) -> None:
    """What is imported and collected stays to the end: the collector, which would look at it again and again, need not."""
    if not session.config.getoption("numprocesses", None) or "PYTEST_XDIST_WORKER" in os.environ:  # who collects
        gc.disable()


def pytest_collection_finish() -> None:
    _freeze()
    gc.enable()


MANY_MODULES = 200  # torch has more, each of autotune's packages fewer
_modules_at_freeze = 0


def _freeze() -> None:
    global _modules_at_freeze
    gc.freeze()
    _modules_at_freeze = len(sys.modules)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Freeze what the test before has imported, if it is much: a full collection takes a second with all of torch."""
    if len(sys.modules) > _modules_at_freeze + MANY_MODULES:
        gc.collect()
        _freeze()


def pytest_sessionfinish() -> None:
    """Freeze all objects: three collections follow, of a second each, only for messages of objects in cycles."""
    gc.freeze()


class Scheduling(LoadScopeScheduling):
    """Tests go to workers one by one, those of a group all to one worker, and what is dear first, in its order: what is
    short fills what is left. (`--dist loadgroup` is meant for groups; that of pytest-xdist 3.8 does not see its own marks
    under pytest 9.2.)"""

    _ordered = False

    def _split_scope(self, nodeid: str) -> str:
        return DEAR.get(nodeid.partition("::")[0]) or nodeid

    def _assign_work_unit(self, node: Any) -> None:
        if not self._ordered:  # the queue has just been filled
            self._ordered = True
            places = {shared or file: -at for at, (file, shared) in enumerate(reversed(DEAR.items()))}
            for scope in sorted(self.workqueue, key=lambda scope: places.get(scope.partition("::")[0], 1)):
                self.workqueue.move_to_end(scope)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    return Scheduling(config, log)


# -- plain helpers -------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """Somebody looks at it."""

    def isatty(self) -> bool:
        return True


def make_setup(job: Job, hardware: Hardware, folder: Path) -> Setup:
    """Return the setup of a run in the default space, before its script's probe run."""
    return Setup(
        request=Request(),
        job=job,
        hardware=hardware,
        space=load_space("default"),
        candidates=(),
        notes=(),
        slots=(),
        name="s",
        folder=folder,
        storage=None,
        global_batch_size=None,
        budget_seconds=60.0,
    )


def make_job(ranks: int = 2, **changes: object) -> Job:
    values = {"seq_len": 32, "precision": "fp32", **changes}
    return Job(resolve_model(str(values.pop("model", "tiny-llama"))), ranks, **values)  # type: ignore[arg-type]


def make_candidate(stage: int = 0, micro_batch: int = 1, accumulation: int = 1, **knobs: Any) -> Candidate:
    small = {"reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000, "sub_group_size": 1_000_000}
    batch = {MICRO_BATCH: micro_batch, ACCUMULATION: accumulation}
    return Candidate.of({"zero_stage": stage, **batch, **small, **knobs})


def capped_ranks(cap_mib: int) -> Hardware:
    """Two CPU ranks with a cap, which other tests that hold main memory now do not lower: no memory is set aside for it."""
    return replace(detect("cpu", 2), memory_bytes=2 * cap_mib * MIB, memory_cap_bytes=cap_mib * MIB)


def wait_until(true: Callable[[], Any], what: str, seconds: float = 120.0) -> None:
    """Returns as soon as `true()` is.

    Raises:
        AssertionError: it is not, so long after; far more than any machine needs.
    """
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, f"still waiting after {seconds:.0f} s: {what}"
        time.sleep(0.05)


def made_anew(module: types.ModuleType) -> Any:
    """The module, run once more, and known to nobody else. mutmut switches a mutant on after all modules are imported: what
    a module makes while it is imported, a table, stands by then, and only one that is made again shows the change."""
    spec = importlib.util.spec_from_file_location(module.__name__, module.__file__)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def lives(process: psutil.Process) -> bool:
    """Whether it runs: one that has ended and that nobody has waited for yet does not."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def pid_lives(pid: int) -> bool:
    try:
        return lives(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def processes_in(folder: Path) -> list[str]:
    """Command lines of the living processes that work in a folder or below it: other tests' have folders of their own."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        cwd = process.info["cwd"]
        if cwd and Path(cwd).is_relative_to(folder.resolve()) and lives(process):
            found.append(" ".join(process.info["cmdline"] or ["?"]))
    return found


@pytest.fixture
def job() -> Job:
    return make_job()


@pytest.fixture
def hardware() -> Hardware:
    return detect("cpu", 2)


# -- once a run ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run that all its workers see."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session", autouse=True)
def traces_of_this_run(shared_folder: Path) -> Iterator[None]:
    """Traces are kept for this run: another run's would hide what a change does to them. They are made in this process,
    where torch is imported once; `python -m …` for each of them costs five times as much. See `tracer_process`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOTUNE_CACHE", str(shared_folder / "cache"))
        patch.setattr(tracing, "_run_tracer", _trace_here)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_look_at_optunas_migrations() -> Iterator[None]:
    """Read the newest of Optuna's migrations once a process. Optuna reads them all whenever it opens a database: 40 ms."""
    manager = getattr(importlib.import_module("optuna.storages._rdb.storage"), "_VersionManager", None)
    if manager is None:  # in another version of Optuna, whose tests take longer
        yield
        return
    read = manager.get_head_version
    newest: list[str] = []

    def get_head_version(self: Any) -> str:
        if not newest:
            newest.append(str(read(self)))
        return newest[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "get_head_version", get_head_version)
        yield


@pytest.fixture
def tracer_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces are made as users' are, each in a process of its own."""
    monkeypatch.setattr(tracing, "_run_tracer", _RUN_TRACER)


_RUN_TRACER = tracing._run_tracer


def _trace_here(options: list[str], asked: str, timeout_seconds: float, *_: object) -> tuple[str, str]:
    """What a tracer's process writes, from this process."""
    tracer = importlib.import_module("autotune.predict.tracer")
    out, err = io.StringIO(), ""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        trace_model = tracer.trace_model
        # As in a process of its own. What traces of other versions' models have left there has ended this one (SIGSEGV, with
        # transformers 4.51 and torch 2.13).
        importlib.import_module("torch._subclasses.fake_tensor").FakeTensorMode.cache_clear()

        def one_worker(job: Job, **options: Any) -> Any:  # a fork of this process would not survive torch's threads
            return trace_model(job, **{**options, "workers": 1})

        patch.setattr(tracer, "trace_model", one_worker)
        patch.setattr(sys, "argv", ["tracer", *options])
        patch.setattr(sys, "stdin", io.StringIO(asked))
        try:
            tracer.main()
        except Exception:
            err = traceback.format_exc()
    return out.getvalue(), err


# -- engines -------------------------------------------------------------------------------------------------------------


class Bench:
    """A LocalExecutor with one fork server; what a test changes of it is set back for the next."""

    def __init__(self, folder: Path) -> None:
        self.fault: dict[str, object] | None = None
        candidates = [make_candidate(), make_candidate(2, offload_optimizer="cpu")]
        self.executor = LocalExecutor(make_job(), capped_ranks(2000), folder, candidates, fault=lambda name: self.fault)
        self._count = 0
        self.reset()
        self.executor.open(lambda text: None)

    def reset(self) -> None:
        """As the first test finds it."""
        self.fault, self.phases = None, list[str]()
        executor = self.executor
        executor.on_phase = self.phases.append
        executor.job = make_job()
        executor.hardware = capped_ranks(2000)
        executor.deadlines = Deadlines(start=60, init=60, step=60)
        executor.cancelled = lambda: False

    def session(self, candidate: Candidate) -> LocalSession:
        self._count += 1
        return self.executor.session(candidate, f"{self._count:04d}")

    def run(
        self, candidate: Candidate, deadline_seconds: float = 120.0, measure_spec: MeasureSpec | None = None
    ) -> Outcome:
        with closing(self.session(candidate)) as session:
            return session.measure(
                candidate, measure_spec or MeasureSpec(min_seconds=0.0, min_steps=2), deadline_seconds
            )

    def left_over(self) -> list[psutil.Process]:
        """Ranks of any trial that still run."""
        launcher = self.executor.launcher
        assert isinstance(launcher, ForkLauncher)
        assert launcher.server is not None
        return [child for child in psutil.Process(launcher.server).children(recursive=True) if lives(child)]


def path_of_ranks(environment: Mapping[str, str]) -> str:
    """The environment's PYTHONPATH with `tests/scripts` first."""
    return os.pathsep.join(filter(None, [str(SCRIPTS), environment.get("PYTHONPATH")]))


class InSharedPages(ForkLauncher):
    """A fork server whose ranks do not copy its memory before they begin (`linux.own_memory`): a quarter of a second of each, for a
    speed that no test looks at. Studies of whole commands do."""

    def __init__(self, *args: Any, modules: list[str], **options: Any) -> None:
        super().__init__(*args, modules=[*modules, SHARED_PAGES], **options)


@pytest.fixture(scope="session")
def _path_of_ranks() -> Iterator[None]:
    """What fork servers of this worker and their ranks find on their path: tests/scripts/own.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path_of_ranks(os.environ))
        patch.setattr(machine, "ForkLauncher", InSharedPages)
        yield


@pytest.fixture(scope="session")
def _bench_of_this_worker(_path_of_ranks: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """The fork server."""
    bench = Bench(tmp_path_factory.mktemp("bench"))
    with closing(bench.executor):
        yield bench


@pytest.fixture
def bench(_bench_of_this_worker: Bench) -> Iterator[Bench]:
    """Real ranks, forked from one server that all tests with `bench` share. A test may change the executor's job, hardware,
    deadlines and faults, and kill what it likes: all is set back, and no rank may be left when it ends."""
    _bench_of_this_worker.executor.ensure_launcher()
    _bench_of_this_worker.reset()
    yield _bench_of_this_worker
    _bench_of_this_worker.executor.ensure_launcher()
    assert _bench_of_this_worker.left_over() == []


@pytest.fixture
def live_bench(bench: Bench) -> Iterator[Bench]:
    """The bench with ranks that count the bytes of live tensors."""
    from tests.rank.live_rank import live_ranks  # imports torch

    with live_ranks():
        yield bench


SHORT = MeasureSpec(min_seconds=0.0, min_steps=2, max_steps=3)


class Scripts:
    """An executor with one fork server that has imported what scripts import; a test gives it a script and a folder."""

    def __init__(self, folder: Path) -> None:
        self.hardware = capped_ranks(3000)
        (folder / "ds.json").write_text("{}")
        job = unknown_job(Script((str(SCRIPTS / "trainer.py"), "--deepspeed", "ds.json"), str(folder)), self.hardware)
        offloaded = make_candidate(2, offload_optimizer="cpu")
        self.executor = LocalExecutor(job, self.hardware, folder, [offloaded])
        self.executor.open(lambda text: None)
        self._count = 0

    def probe(
        self, argv: list[str], cwd: Path, flags: tuple[tuple[str, str], ...] = (), seconds: float = 300.0
    ) -> Probe:
        return self.probe_script(Script(tuple(argv), str(cwd), flags), seconds)

    def probe_script(self, script: Script, seconds: float = 300.0) -> Probe:
        folder = self.executor.folder = Path(script.cwd) / "runs" / "study"
        folder.mkdir(parents=True, exist_ok=True)
        self.executor.job = unknown_job(script, self.hardware)
        budget = StartupDeadline(seconds)
        budget.begin(self.executor, self.executor.now() - self.executor.ops.all_build_seconds)
        return probe(self.executor, script, folder, budget, lambda text: None)

    def measure(self, probed: Probe, candidate: Candidate) -> Outcome:
        """In the folder of the probe before it."""
        self._count += 1
        self.executor.job = job_of(probed.script, self.hardware, None)
        with closing(self.executor.session(candidate, f"{self._count:04d}")) as session:
            return session.measure(candidate, SHORT, 300.0)


@pytest.fixture(scope="session")
def scripts(_path_of_ranks: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripts]:
    """One fork server for all tests that measure a script; each test has a folder of its own and starts with a probe,
    which sets the executor's job and folder."""
    made = Scripts(tmp_path_factory.mktemp("scripts"))
    with closing(made.executor), pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "trial_sandbox", _with_seen)
        yield made


def _with_seen(*args: Any, kept: Sequence[str] = (), **how: Any) -> Sandbox:
    """A trial's sandbox whose script can write to `seen/` for a test that has made it."""
    seen = f"{args[1].script.cwd}/seen"
    return trial_sandbox(*args, kept=[*kept, *([seen] if os.path.isdir(seen) else [])], **how)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- a driver ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def driver_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`libnvidia-ml.so.1` of `tests/fake_driver`."""
    return fake_driver.build(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def driver(driver_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> fake_driver.Driver:
    """A driver for NVML's bindings in this process, of a machine without a GPU; `driver.environment` is another's."""
    made = fake_driver.Driver(driver_library, tmp_path / "machine.txt")
    made.write()
    fake_driver.install(made, monkeypatch)
    monkeypatch.setattr(nvml, "LOOK_AGAIN_SECONDS", 0.01)
    return made
