"""Without Ray, what needs it says how to get it."""

import sys

import pytest

from torchrl_asyncgrpo import RayBackend, RayEngine


@pytest.mark.parametrize("build", [RayBackend, RayEngine])
def test_says_how_to_install_it(build, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"ray is not installed: pip install 'torchrl-asyncgrpo\[ray\]'"):
        build(lambda: None)
