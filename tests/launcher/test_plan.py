"""From a configuration to processes."""

from pathlib import Path

import pytest

from common.config import load
from common.errors import ConfigError
from common.launcher.plan import blas_threads, check_models, plan, replicas

RUN = Path("/run/x")


def config_of(**flags):
    return load(None, {name.replace("__", "."): value for name, value in flags.items()}, {}).config


def test_default_plan_is_one_of_each_in_start_order():
    """The coordinator must listen before a worker says Hello."""
    specs = plan(config_of(), RUN)
    assert [spec.name for spec in specs] == ["coordinator", "target.1", "drafter.1"]


def test_replicas_are_numbered_from_one():
    """`scale`, `logs` and `restart` name processes this way."""
    specs = plan(config_of(target__replicas=2, drafter__replicas=3), RUN)
    names = [spec.name for spec in specs]
    assert names[1:] == ["target.1", "target.2", "drafter.1", "drafter.2", "drafter.3"]


def test_a_process_is_started_by_module_name_and_told_its_run_folder():
    """The launcher imports no service: a broken one must not break `ps`."""
    target = plan(config_of(), RUN)[1]
    assert target.argv[1:] == (
        "-P",
        "-m",
        "target_svc",
        "--run-dir",
        "/run/x",
        "--name",
        "target.1",
    )


def test_only_some_roles_can_be_planned():
    """`up --only coordinator,target` leaves drafting to other machines."""
    specs = plan(config_of(), RUN, ("target", "coordinator"))
    assert [spec.name for spec in specs] == ["coordinator", "target.1"]


def test_workers_of_a_coordinator_elsewhere_say_where_they_are():
    """Two machines with a `drafter.1` each would push each other out."""
    config = config_of(keys__name="drafter-box")
    assert [spec.name for spec in plan(config, RUN, ("drafter",))] == ["drafter.1@drafter-box"]


def test_a_target_without_drafter_checkpoint_gets_no_drafter():
    """The embedded drafter does not fit another target."""
    config = config_of(model__target="/models/big", drafter__replicas=2)
    assert replicas(config, "drafter") == 0


def test_blas_settings_are_in_the_environment_before_the_library_loads():
    """OpenBLAS reads them once, when it is loaded."""
    environ = plan(config_of(target__threads=2), RUN)[1].environ
    assert environ["OPENBLAS_NUM_THREADS"] == "2"
    assert int(environ["OPENBLAS_THREAD_TIMEOUT"]) < 26
    assert environ["PYTHONUNBUFFERED"] == "1"


@pytest.mark.parametrize(("n_targets", "threads"), [(1, 4), (2, 2), (3, 1), (20, 1)])
def test_replicas_of_a_role_share_the_cores(n_targets, threads):
    """One thread too many makes every product wait: half the cores are the other role's."""
    assert blas_threads(config_of(target__replicas=n_targets), "target", n_cores=8) == threads


def test_missing_checkpoint_is_named_before_anything_starts(tmp_path):
    """A wrong path must not cost a start-up and a restart loop."""
    with pytest.raises(ConfigError, match=r"model\.target: .*nowhere"):
        check_models(config_of(model__target=str(tmp_path / "nowhere")))


def test_drafter_is_tried_for_ever_and_target_a_few_times():
    """Without a drafter the run serves; without a target it does not."""
    coordinator, target, drafter = plan(config_of(), RUN)
    assert (coordinator.restarts, target.restarts, drafter.restarts) == (0, 3, None)
