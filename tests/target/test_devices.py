"""What a process asks once of its device is asked anew where a test changes the device."""

from types import SimpleNamespace

import mlx.core as mx
import pytest
from support.devices import on_device

from target_svc.models.blocks import norms
from target_svc.models.blocks.norms import is_cpu


def test_a_choice_made_before_does_not_outlive_its_device(monkeypatch):
    """Device tests that were skipped, or ran in the CPU's forms, after another module."""
    gpu = SimpleNamespace(type=mx.DeviceType.gpu)
    with on_device(mx.cpu), monkeypatch.context() as patch:
        patch.setattr(norms.mx, "default_device", lambda: gpu)
        is_cpu.cache_clear()
        assert not is_cpu()  # and this answer is kept ..
        patch.undo()
        assert not is_cpu()
        with on_device(mx.cpu):
            assert is_cpu()  # .. until the device is chosen
    assert is_cpu()


def test_the_device_before_is_back_after_a_failure():
    """A test that fails on one device and sends the next one there."""
    before = mx.default_device()
    with pytest.raises(ValueError, match="planted"), on_device(mx.cpu):
        raise ValueError("planted")
    assert mx.default_device() == before
