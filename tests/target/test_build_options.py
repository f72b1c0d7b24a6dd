"""How a configuration becomes a way to build, and where an operator sees it."""

import pytest

from common.errors import ConfigError
from common.settings import TargetConfig
from target_svc.__main__ import notes_of, options_of
from target_svc.load import ON_CPU, load_engine, verify_plan


@pytest.mark.parametrize(
    ("fields", "name", "prebuilds"),
    [
        ({}, ON_CPU.build.name, ON_CPU.prebuilds),
        ({"build": "whole"}, "whole eager", ON_CPU.prebuilds),
        ({"build": "whole", "ple": "deferred", "prebuild": "off"}, "whole deferred", False),
        ({"build": "pipelined", "pipeline_layers": 4}, "pipelined/4 eager", ON_CPU.prebuilds),
        ({"pipeline_layers": 2, "ple": "deferred"}, "pipelined/2 deferred", ON_CPU.prebuilds),
        ({"prebuild": "on"}, ON_CPU.build.name, True),
        ({"prebuild": "overlap"}, ON_CPU.build.name, True),
    ],
)
def test_each_key_changes_what_it_names(fields, name, prebuilds):
    """A key that is read and forgotten."""
    plan = verify_plan(options_of(TargetConfig(**fields), None))
    assert (plan.build.name, plan.prebuilds) == (name, prebuilds)
    assert plan.overlaps == (fields.get("prebuild") == "overlap")


def test_layers_of_a_graph_that_is_handed_over_whole_are_refused():
    """Two keys that contradict each other: one of them would be ignored."""
    with pytest.raises(ConfigError, match=r"target\.pipeline_layers: 3 .*'whole'"):
        options_of(TargetConfig(build="whole", pipeline_layers=3), None)


def test_ps_shows_how_forwards_are_built(folders):
    """A mode that is asked for and not armed."""
    options = options_of(TargetConfig(build="whole", ple="deferred", prebuild="off"), None)
    notes = notes_of(load_engine(folders["main"], None, options))
    assert (notes["build"], notes["prebuild"]) == ("whole deferred", "off")
    assert notes["weights"] == "plain"
