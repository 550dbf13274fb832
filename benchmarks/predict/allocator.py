"""What the caching allocator adds to live activations: `python benchmarks/predict/allocator.py [--json FILE]`.

Every allocation of a traced forward and backward (six layers of each model) is replayed through a model of the
allocator, with memory to spare. The predictor takes 0.15 +- 0.08 for all traces: what a replay says hangs on where long-lived
blocks fall, and published peaks do not bear it out (docs/predictor-figures.md, "Tried and left").
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

from autotune.predict.tracer import allocations
from autotune.problem.job import Job
from autotune.problem.models import resolve_model
from benchmarks.common import command_line, parse, print_table, write_json
from benchmarks.predict.caching_allocator import waste

MODELS = (("gemma-2-2b", 768), ("llama-3.2-1b", 2048), ("qwen2.5-0.5b", 1024), ("mistral-7b", 2048))


def main() -> None:
    arguments = parse(command_line(__doc__))
    rows = []
    for name, seq_len in (("tiny-llama", 64),) if arguments.small else MODELS:
        job = Job(resolve_model(name), 1, seq_len, "bf16")
        for checkpointing in (False, True):
            for micro_batch in (1, 4):
                events = allocations(job, checkpointing, micro_batch, 6)
                born: set[int] = set()
                kept = []
                for key, size in events:  # what was there before is freed outside of the replay
                    if size > 0:
                        born.add(key)
                    elif key not in born:
                        continue
                    else:
                        born.discard(key)
                    kept.append((key, size))
                rows.append(
                    {
                        "model": name,
                        "seq_len": seq_len,
                        "checkpointing": checkpointing,
                        "micro_batch": micro_batch,
                        "reserved / live at peak": round(waste(kept), 4),
                    }
                )
    print_table("the caching allocator's share, replayed", rows)
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
