"""The cache of built wheels."""

from __future__ import annotations

import sys
import sysconfig
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from unidist.errors import ConfigurationError
from unidist_launch.horovod_build.wheel_cache import WheelCache

_TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"
_PLATFORM = sysconfig.get_platform().replace("-", "_").replace(".", "_")


def built(folder: Path, version: str, tag: str = _TAG, platform: str = _PLATFORM) -> Path:
    wheel = folder / f"thing-{version}-{tag}-{tag}-{platform}.whl"
    wheel.write_text(version)
    return wheel


def test_a_stored_wheel_is_found_by_name_and_version_alone(tmp_path: Path) -> None:
    cache = WheelCache(tmp_path / "cache", revision=1)
    assert cache.find("thing", "1+a") is None
    stored = cache.store(built(tmp_path, "1+a"))
    assert cache.find("thing", "1+a") == stored
    assert cache.find("thing", "1+a.b") is None
    assert cache.find("other", "1+a") is None
    assert WheelCache(tmp_path / "cache", revision=2).find("thing", "1+a") is None


@pytest.mark.parametrize(("tag", "platform"), [("cp27", _PLATFORM), (_TAG, "other_machine")])
def test_a_wheel_for_another_python_or_platform_is_not_found(tmp_path: Path, tag: str, platform: str) -> None:
    cache = WheelCache(tmp_path / "cache", revision=1)
    cache.store(built(tmp_path, "1", tag, platform))
    assert cache.find("thing", "1") is None


def test_the_default_is_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert WheelCache(None, revision=1).folder == tmp_path / "unidist"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert WheelCache(None, revision=1).folder == tmp_path / "home" / ".cache" / "unidist"


def test_a_second_build_waits_for_the_first_and_says_so(tmp_path: Path) -> None:
    first, second = WheelCache(tmp_path, revision=1), WheelCache(tmp_path, revision=1)
    said: list[str] = []
    order: list[str] = []
    told = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        told.set()

    def wait() -> None:
        with second.locked(timeout=timedelta(seconds=60), say=say):
            order.append("second")

    with first.locked(timeout=timedelta(seconds=60), say=said.append):
        thread = threading.Thread(target=wait)
        thread.start()
        assert told.wait(60)
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"]
    assert len(said) == 1
    assert "another build is at work (process " in said[0]


def test_waiting_for_another_build_has_an_end(tmp_path: Path) -> None:
    cache = WheelCache(tmp_path, revision=1)
    with (
        cache.locked(timeout=timedelta(seconds=1), say=print),
        pytest.raises(ConfigurationError, match="longer than"),
        WheelCache(tmp_path, revision=1).locked(timeout=timedelta(seconds=0.1), say=lambda text: None),
    ):
        raise AssertionError("two builds at a time")
