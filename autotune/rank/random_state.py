"""Random state of a rank: the same in every trial, also for generators that a script seeds by default or not at all."""

from __future__ import annotations

import hashlib
import os
import random
import secrets
import sys
import uuid
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from autotune.rank.patches import Call, Patches

_MOST_WATCHED = 64  # generators; a data set may make one for each sample
_MOST_SEEDS = 64  # seeds that a script names; a data set may name one for each sample
# Modules with a generator for names of files. Such names must differ between trials, which share caches and /dev/shm:
# multiprocessing gives up after 100 names of semaphores that exist, and `datasets` loads a cache file that has the name.
_NAMING = ("tempfile", "datasets.fingerprint")


class RandomState:
    """Random state of one rank.

    Once installed, its seed is the only source of default seeds: `random.Random()`, `torch.seed()`,
    `torch.Generator().seed()`, `numpy.random.default_rng()`, `secrets.randbits` and `os.urandom` no longer draw from the
    kernel. Names and tokens (`uuid4`, `secrets.token_hex`, `secrets.choice`) still do. A script may compute the
    seeds that it names from the time, a process id, a hash or a UUID. Its first run records those before the first forward,
    and the next runs repeat them.

    Attributes:
        named: the first seeds that the script named, each with its place in the code. The argument has the first run's.
        repeats: the script named another seed than in its first run.
    """

    def __init__(self, rank: int = 0, named: Sequence[Sequence[Any]] = ()) -> None:
        self._rank, self._seed, self._pid = rank, 0, os.getpid()
        self._entropy = random.Random(f"0.{rank}")
        self.named: list[list[Any]] = []
        self.repeats = False
        self._before_engine: int | None = None  # number of seeds
        self._is_scripts, self._first_pid = True, os.getpid()  # False while this class seeds, and after `leave_seeds`
        self._seeding = {_package(__name__)}  # packages whose frames do not tell places of a script apart
        self._known: dict[str, deque[Any]] = {}
        for place, seed in named:
            self._known.setdefault(place, deque()).append(seed)
        # last generators of torch and numpy that the script has made; numpy's allow no weak reference
        self._own: deque[Any] = deque(maxlen=_MOST_WATCHED)
        self.marked: tuple[list[tuple[Any, Any]], tuple[Any, ...]] | None = None

    def seed(self, seed: int) -> None:
        """Seed the global generators; torch alike on all ranks, as by default, the others by rank."""
        import torch

        self._seed, self._entropy = seed, random.Random(f"{seed}.{self._rank}")
        self._is_scripts = False
        torch.manual_seed(seed)
        random.seed(seed * 1_000_003 + self._rank)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed((seed * 1_000_003 + self._rank) % 2**32)
        self._is_scripts = True

    def reseed(self, seed: int) -> None:
        """Give other numbers to all generators, also to those that the script has made and seeded.

        Generators that are in one state on all ranks stay so, because a script may choose a collective by them.
        """
        import torch

        self._seed, self._entropy = seed, random.Random(f"{seed}.{self._rank}")
        self.leave_seeds()
        torch.manual_seed(seed)
        random.seed(_next_seed(seed, random.getstate()))
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(_next_seed(seed, _numpy_state(numpy)) % 2**32)
        for one in list(self._own):
            number = _next_seed(seed, _state(one))
            if hasattr(one, "manual_seed"):
                one.manual_seed(number)
            else:
                one.bit_generator.state = type(one.bit_generator)(number).state

    # -- seeds ---------------------------------------------------------------------------------------------------------

    def install(self, patches: Patches) -> None:
        """Take the place of the kernel's random numbers, and note the seeds that the script names and its generators."""
        import torch

        from autotune.rank.devices import seeding_modules

        kernel = os.urandom

        def seeds(owner: Any, name: str, around: Callable[[Call], Any]) -> None:
            self._seeding.add(_package(getattr(owner, "__module__", owner.__name__)))
            patches.wrap(owner, name, around)

        def urandom(call: Call) -> bytes:
            return self._bytes(call.args[0])

        def seed_python(call: Call) -> None:
            seed = self._repeated(call.given["a"])
            if seed is None:
                caller = sys._getframe(3).f_globals  # globals of the caller of `Random.__init__`, which calls `wrap`
                is_naming = caller.get("__name__") in _NAMING
                seed = kernel(16) if is_naming else self._number()
            call.change(a=seed)
            call()

        def seed_numpy(call: Call) -> Any:
            seed = [*call.args, call.kwargs.get("seed")][0]  # numpy 1 gives its functions no signature
            return call.original(self._repeated(seed))

        def seed_all(call: Call) -> Any:
            call.change(seed=self._repeated(call.given["seed"]))
            theirs = self._is_scripts
            self._is_scripts = False  # `torch.manual_seed` calls `torch.cuda.manual_seed_all`
            try:
                return call()
            finally:
                self._is_scripts = theirs

        def choose(call: Call) -> Any:
            options = call.given["seq"]
            return options[int.from_bytes(kernel(8), "big") % max(1, len(options))]

        def seed_torch(_: Call) -> int:
            torch.manual_seed(number := self._number())
            return number

        patches.wrap(os, "urandom", urandom)
        patches.wrap(random, "_urandom", urandom)  # read by `SystemRandom`, `secrets` and numpy's `SeedSequence`
        # Names by uuid and tokens must differ between trials that share a folder. numpy takes its seeds from `secrets.randbits`.
        patches.wrap(uuid, "uuid4", lambda _: uuid.UUID(bytes=kernel(16), version=4))
        patches.wrap(secrets, "token_bytes", lambda call: kernel(call.given["nbytes"] or secrets.DEFAULT_ENTROPY))
        patches.wrap(secrets, "choice", choose)
        seeds(random.Random, "seed", seed_python)
        seeds(random, "seed", seed_python)
        for owner in (torch, torch.random):
            seeds(owner, "seed", seed_torch)
        for owner in seeding_modules():
            for name in ("manual_seed", "manual_seed_all"):
                if hasattr(owner, name):
                    seeds(owner, name, seed_all)
        patches.replace(torch, "Generator", self._generator_class())
        if (numpy := sys.modules.get("numpy")) is not None:
            seeds(numpy.random, "seed", seed_numpy)
            seeds(numpy.random, "default_rng", lambda call: self._note(seed_numpy(call)))

    def _bytes(self, count: int) -> bytes:
        """Return bytes in place of the kernel's. Each worker of a data loader draws its own, as torch seeds it."""
        if os.getpid() != self._pid:
            import torch

            worker, self._pid = torch.utils.data.get_worker_info(), os.getpid()
            self._entropy = random.Random(f"{self._seed}.{self._rank}.{worker.seed if worker else self._pid}")
        return self._entropy.randbytes(count)

    def _number(self) -> int:
        return int.from_bytes(self._bytes(8), "big") >> 1  # 63 bits, which torch's seeds may have

    def _repeated(self, seed: Any) -> Any:
        """Return the seed that the script named at this place in its first run; without one, this seed."""
        theirs = self._is_scripts and os.getpid() == self._first_pid  # workers of a data loader have their own seeds
        if not theirs or not isinstance(seed, int | float | str):
            return seed
        place = _place(self._seeding)
        if len(self.named) < _MOST_SEEDS:
            self.named.append([place, seed])
        known = self._known.get(place)
        if not known:
            return seed
        first = known.popleft()
        self.repeats = self.repeats or first != seed
        return first

    def note_engine(self) -> None:
        """Take seeds from now on for those of rows that the script reads, unless one place names only one."""
        self._before_engine = len(self.named) if self._before_engine is None else self._before_engine

    def leave_seeds(self) -> None:
        """Record and repeat no seed that the script names from now on."""
        self._is_scripts = False
        before = self.named[: self._before_engine]
        later = self.named[len(before) :]
        times = Counter(place for place, _ in later)
        self.named = [*before, *([place, seed] for place, seed in later if times[place] == 1)]
        self._before_engine = len(self.named)

    def _note(self, generator: Any) -> Any:
        self._own.append(generator)
        return generator

    def _generator_class(self) -> type:
        """Return a stand-in for torch's Generator, whose own `seed` reads the kernel's random numbers in C++."""
        import torch

        original: Any = torch.Generator

        kind: Any = type(original)

        class _Instances(kind):  # type: ignore[misc]
            def __instancecheck__(cls, instance: Any) -> bool:
                return bool(kind.__instancecheck__(original, instance))

        def made(generator: Any, *_: Any, **__: Any) -> None:
            self._note(generator)

        def manual_seed(generator: Any, seed: Any) -> Any:
            return original.manual_seed(generator, self._repeated(seed))

        def seed(generator: Any) -> int:
            original.manual_seed(generator, number := self._number())
            return number

        methods = {"__init__": made, "manual_seed": manual_seed, "seed": seed, "__module__": "torch"}
        return _Instances("Generator", (original,), methods)

    # -- draws -------------------------------------------------------------------------------------------------------

    def mark(self) -> None:
        """Remember the states of all generators at the first forward, for `has_drawn`."""
        self.leave_seeds()
        self.marked = [(one, _state(one)) for one in self._own], self._states()

    def has_drawn(self) -> bool:
        """Return True if random numbers were drawn since `mark`.

        A generator that was made since then counts if its seed was drawn. One that the script seeds by a row's number
        or by a counter draws what it would draw in every run.
        """
        if self.marked is None:
            return False
        own, states = self.marked
        return self._states() != states or any(_state(one) != state for one, state in own)

    def _states(self) -> tuple[Any, ...]:
        return (*_global_states(), self._entropy.getstate())


def _package(module: str) -> str:
    """Return the top package of a module's name."""
    return module.partition(".")[0]


def _place(libraries: Collection[str]) -> str:
    """Return the file and line at which the first caller outside of these packages names a seed."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _package(frame.f_globals.get("__name__", "")) in libraries:
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _next_seed(seed: int, state: Any) -> int:
    """Return a seed of 63 bits that follows from a seed and a generator's state."""
    digest = hashlib.sha256(f"{seed}.{state!r}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _numpy_state(numpy: Any) -> list[Any]:
    """Return the state of numpy's global generator."""
    _, keys, position, *_ = numpy.random.get_state()
    return [keys.tobytes(), position]


def _state(generator: Any) -> Any:
    """Return the state of a generator of torch or numpy in a form that can be compared."""
    read = getattr(generator, "get_state", None)
    return read().numpy().tobytes() if read is not None else str(generator.bit_generator.state)


def _global_states() -> tuple[Any, ...]:
    """Return the states of all generators that a training usually draws from."""
    import torch

    from autotune.rank.devices import generator_state

    numpy = sys.modules.get("numpy")
    of_torch = torch.get_rng_state().numpy().tobytes()
    return random.getstate(), numpy and _numpy_state(numpy), of_torch, generator_state()
