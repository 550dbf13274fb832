"""Depths at which a deep model is traced, and what follows for the deep one; no torch."""

from types import SimpleNamespace
from typing import Any

import pytest

from autotune.predict.trace_data import BACKWARD, FORWARD, Pass
from autotune.predict.tracer import at_depth, depths_of, extrapolate, extrapolation


class Config(SimpleNamespace):
    def get_text_config(self) -> Any:
        return self


def pass_of(layers: int) -> Pass:
    """A model of an embedding (100 bytes), `layers` layers of two allocations (10 and 4 bytes) and a head (50)."""
    forward, alive = [100.0], 100.0
    for _ in range(layers):
        forward += [alive + 10, alive + 14]
        alive += 14
    forward.append(alive + 50)
    backward = [alive - 14 * layer + 5 for layer in range(layers)]
    count = len(forward) + len(backward)
    return Pass(
        phase=[FORWARD] * len(forward) + [BACKWARD] * len(backward),
        fixed=[0.0] * count,
        per_sequence=forward + backward,
        gradients=[0.0] * len(forward) + [3.0 * layer for layer in range(layers)],
        after_forward=(0.0, alive + 50),
        flops=(7.0 * layers + 2, 14.0 * layers + 4),
        attention=(3.0 * layers, 6.0 * layers),
        moved=((1.0, 2.0 * layers), (2.0, 4.0 * layers)),
        operators=(3.0 * layers + 2, 5.0 * layers + 1),
    )


@pytest.mark.parametrize(
    ("layers", "pattern", "depths"),
    [
        (24, None, (2, 3)),
        (27, ["sliding", "full"], (3, 5)),
        (26, ["sliding"] * 5 + ["full"], (8, 14)),  # 26 = 3 x 6 + 8
        (4, None, None),  # nothing is won below two depths and the whole
        (7, ["a", "b", "c", "d", "e", "f", "g"], None),  # no period but the whole
    ],
)
def test_depths_differ_by_a_period_and_leave_the_deep_models_remainder(
    layers: int, pattern: list[str] | None, depths: tuple[int, int] | None
) -> None:
    kinds = {} if pattern is None else {"layer_types": [pattern[i % len(pattern)] for i in range(layers)]}
    found = extrapolation(Config(num_hidden_layers=layers, **kinds))
    if depths is None:
        assert found is None
        return
    short, long = depths
    times = (layers - long) / (long - short)
    assert found == ({"num_hidden_layers": short}, [({"num_hidden_layers": long}, times)])
    assert (layers - short) % len(pattern or [0]) == 0 == (layers - long) % len(pattern or [0])


@pytest.mark.parametrize("irregular", [{"num_kv_shared_layers": 2}, {"first_k_dense_replace": 1}])
def test_layers_that_differ_without_a_pattern_are_all_run(irregular: dict[str, Any]) -> None:
    assert extrapolation(Config(num_hidden_layers=24)) is not None
    assert extrapolation(Config(num_hidden_layers=24, **irregular)) is None


def model_of(kinds: list[type], inner: str = "layers") -> Any:
    torch = pytest.importorskip("torch")
    with torch.device("meta"):
        model = torch.nn.Module()
        setattr(model, inner, torch.nn.ModuleList(torch.nn.ModuleDict({"one": kind(4, 4)}) for kind in kinds))
    return model


def kinds_at(indices: set[int], layers: int) -> list[type]:
    from torch import nn

    return [nn.Embedding if layer in indices else nn.Linear for layer in range(layers)]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("indices", "layers", "found"),
    [
        (set(), 32, (2, 3)),
        ({9, 18, 27}, 32, None),  # Bamba's attention: two depths would be more layers than there are
        ({9, 18, 27, 36, 45, 54}, 60, (15, 24)),
        (set(range(4, 32, 8)), 32, (8, 16)),  # Jamba's, told by a period and an offset
        ({0}, 24, (2, 3)),  # T5's first layer has what no other has
        ({31}, 32, None),
    ],
)
def test_the_model_itself_says_which_layers_are_alike(
    indices: set[int], layers: int, found: tuple[int, int] | None
) -> None:
    config = Config(num_hidden_layers=layers, attn_layer_indices=sorted(indices))
    got = extrapolation(config, model_of(kinds_at(indices, layers)))
    if found is None:
        assert got is None
        return
    assert (got.short["num_hidden_layers"], got.longer[0][0]["num_hidden_layers"]) == found


def test_patterns_of_two_periods_repeat_after_their_least_common_multiple() -> None:
    kinds = {"layer_types": ["a", "b"] * 24, "rope": [1, 1, 0] * 16}
    found = extrapolation(Config(num_hidden_layers=48, **kinds), model_of(kinds_at(set(), 48)))
    assert found == ({"num_hidden_layers": 6}, [({"num_hidden_layers": 12}, 6.0)])
    of_model = extrapolation(
        Config(num_hidden_layers=48, layer_types=["a", "b"] * 24), model_of(kinds_at(set(range(2, 48, 3)), 48))
    )
    assert of_model == found


def test_sizes_and_switches_tell_layers_apart_and_numbers_that_count_them_do_not() -> None:
    torch = pytest.importorskip("torch")

    def numbered(odd: Any) -> Any:
        model = model_of(kinds_at(set(), 24))
        for at, layer in enumerate(model.layers):
            layer.layer_idx, layer.name, layer.window = at, f"layer.{at}", 0.1 * at
            layer.local = odd(at) if callable(odd) else False
        return model

    config = Config(num_hidden_layers=24)
    assert extrapolation(config, numbered(None)) == extrapolation(config)
    by_switch = extrapolation(config, numbered(lambda at: at % 2 == 1))
    assert by_switch.short == {"num_hidden_layers": 2}
    assert by_switch.longer[0][0] == {"num_hidden_layers": 4}
    wider = numbered(None)
    wider.layers[11].one = torch.nn.Linear(4, 8, device="meta")
    assert extrapolation(config, wider) is None


def test_a_model_inside_another_is_run_whole_unless_it_is_the_text() -> None:
    inner = Config(num_hidden_layers=24)
    assert extrapolation(SimpleNamespace(get_text_config=lambda: inner)) is None
    seeing = SimpleNamespace(get_text_config=lambda: inner, text_config=inner)
    assert extrapolation(seeing) == ({"num_hidden_layers": 2}, [({"num_hidden_layers": 3}, 21.0)])
    seeing.vision_config = Config(deepstack_visual_indexes=[5, 11, 17])
    found = extrapolation(seeing)
    assert found.short == {"num_hidden_layers": 5}, "the first three take features of the image"


def test_a_tower_for_images() -> None:
    text = Config(num_hidden_layers=24)

    def seeing(vision: Config, **more: Any) -> Config:
        return Config(get_text_config=lambda: text, text_config=text, vision_config=vision, **more)

    clip = extrapolation(seeing(Config(num_hidden_layers=24), vision_feature_layer=-2))
    assert clip.short == {"num_hidden_layers": 2, "vision_config.num_hidden_layers": 4}, "the last layer is not used"
    chosen = extrapolation(seeing(Config(num_hidden_layers=24), vision_feature_layer=[3, 9]))
    assert chosen.short == {"num_hidden_layers": 2}
    windows = seeing(Config(depth=32, fullatt_block_indexes=[7, 15, 23, 31]))
    found = extrapolation(windows)
    assert found.short == {"num_hidden_layers": 2, "vision_config.depth": 8}
    assert found.longer[1] == ({"num_hidden_layers": 2, "vision_config.depth": 16}, 2.0)
    cut = at_depth(seeing(Config(depth=32, fullatt_block_indexes=[7, 15, 23, 31])), {"vision_config.depth": 16})
    assert (cut.vision_config.depth, cut.vision_config.fullatt_block_indexes) == (16, [7, 15])


def test_an_encoder_and_a_decoder() -> None:
    bart = {"is_encoder_decoder": True, "encoder_layers": 12, "num_hidden_layers": 12}
    short = {"encoder_layers": 2, "decoder_layers": 2}
    both = ({"encoder_layers": 3, "decoder_layers": 3}, 9.0)
    assert extrapolation(Config(**bart, decoder_layers=12)) == (short, [both])
    apart = [({**short, "encoder_layers": 3}, 9.0), ({**short, "decoder_layers": 3}, 21.0)]
    assert extrapolation(Config(**bart, decoder_layers=24)) == (short, apart)
    few = {"is_encoder_decoder": True, "num_layers": 2, "num_decoder_layers": 24}
    found = extrapolation(Config(**few))
    assert found == ({"num_layers": 2, "num_decoder_layers": 2}, [({"num_layers": 2, "num_decoder_layers": 3}, 21.0)])
    assert extrapolation(Config(**few | {"num_decoder_layers": 4})) is None
    assert depths_of(Config(is_encoder_decoder=True, encoder=1, decoder=2)) is None
    cut = at_depth(Config(**few), {"num_layers": 2, "num_decoder_layers": 3})
    assert (cut.num_layers, cut.num_decoder_layers) == (2, 3)


def test_a_shallow_copy_cuts_what_has_an_entry_a_layer_and_leaves_the_original() -> None:
    config = Config(num_hidden_layers=4, layer_types=list("abab"), sizes=(1, 2, 3, 4), other=[1, 2])
    cut = at_depth(config, {"num_hidden_layers": 3})
    assert (cut.num_hidden_layers, cut.layer_types, cut.sizes, cut.other) == (3, ["a", "b", "a"], (1, 2, 3), [1, 2])
    assert (config.num_hidden_layers, config.layer_types) == (4, ["a", "b", "a", "b"])


def test_what_is_added_by_layers_is_extrapolated_exactly() -> None:
    whole = pass_of(40)
    found = extrapolate(pass_of(2), [(pass_of(3), 37.0)])
    for name in ("after_forward", "flops", "attention", "moved", "operators"):
        assert getattr(found, name) == getattr(whole, name), name
    for phase in (FORWARD, BACKWARD):
        peaks = [
            max(p for p, at in zip(run.per_sequence, run.phase, strict=True) if at == phase) for run in (found, whole)
        ]
        assert peaks[0] == peaks[1]
