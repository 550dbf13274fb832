import re

from autotune.problem.gpu_specs import gpu_table, price_table


def test_every_price_is_of_a_known_card_and_has_a_source_and_a_date() -> None:
    assert set(price_table()) <= set(gpu_table())
    assert len(price_table()) >= 20
    for name, price in price_table().items():
        assert 0.05 < price.usd_per_hour < 20, name
        assert re.fullmatch(r"20\d\d(-\d\d)?", price.date), name
        assert len(price.source) > 10, name


def test_more_of_a_card_costs_more() -> None:
    prices = {name: price.usd_per_hour for name, price in price_table().items()}
    assert prices["a100-40gb"] < prices["h100"] < prices["h200"] < prices["b200"]
    assert prices["h100-pcie"] < prices["h100"]
