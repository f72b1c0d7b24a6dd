"""Several of a role: requests spread, scaling is live, and `down` leaves nothing behind."""

import threading

import pytest
from support.running import ROOT, prompt_files, prompt_of, running, wait_until

from common.sdk import Client

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

START = {
    "two-drafters.toml": ("-f", ROOT / "compose" / "two-drafters.toml"),
    "--scale drafter=2": ("--scale", "drafter=2"),
}


def ready(system, role):
    return [
        worker
        for worker in system.ps()
        if worker["name"].startswith(role) and worker["state"] in ("ready", "busy")
    ]


def ask_at_once(system, n_requests, max_tokens=80):
    """Send requests together; returns their completions."""
    done = [None] * n_requests

    def ask(index):
        with Client(run_dir=system.run_dir, timeout_s=90) as client:
            prompt = prompt_of(prompt_files()[index % len(prompt_files())])
            done[index] = client.generate(prompt, max_tokens=max_tokens, ignore_eos=True)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(n_requests)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return done


@pytest.mark.parametrize("how", START)
def test_two_drafters_share_four_requests(how):
    """Both must draft, or the second one is an ornament."""
    with running(*START[how]) as system:
        assert len(ready(system, "drafter")) == 2

        completions = ask_at_once(system, 4)

        assert all(len(one.token_ids) == 80 for one in completions)
        drafts = [worker["counters"]["drafts"] for worker in ready(system, "drafter")]
        assert len(drafts) == 2
        assert min(drafts) > 0


def test_two_targets_share_four_requests():
    """Requests go to the target with the least to do."""
    with running("--scale", "target=2") as system:
        completions = ask_at_once(system, 4)

        assert all(len(one.token_ids) == 80 for one in completions)
        verifies = [worker["counters"]["verifies"] for worker in ready(system, "target")]
        assert len(verifies) == 2
        assert min(verifies) > 0


def test_live_scale_up_and_down():
    """Scaling down drains: what runs is finished, what is new goes elsewhere."""
    with running() as system:
        system.command("scale", "drafter=2", "target=2")
        wait_until(lambda: len(ready(system, "drafter")) == 2, "two drafters ready", 60)
        wait_until(lambda: len(ready(system, "target")) == 2, "two targets ready", 60)

        completions = ask_at_once(system, 2, max_tokens=120)
        system.command("scale", "drafter=1", "target=1")

        assert all(len(one.token_ids) == 120 for one in completions)
        wait_until(lambda: len(system.ps()) == 3, "three processes left", 60)
        assert len(ask_at_once(system, 1)[0].token_ids) == 80
