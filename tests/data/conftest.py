import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    """No test reads or fills the user's cache; only the real data's tests see FEDGROVE_DATA."""
    monkeypatch.setenv("FEDGROVE_CACHE", str(tmp_path_factory.getbasetemp() / "fedgrove-cache"))
