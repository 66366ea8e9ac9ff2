"""Tests of files that are written from operations."""

from collections.abc import Iterator

import pytest

from fmapper.translation import source

_BOTH = ("transcri", "test_way_back", "test_fast_layers")


@pytest.fixture(autouse=True, scope="module")
def only_operations(request: pytest.FixtureRequest) -> Iterator[None]:
    """Has nothing transcribed, but in the tests of transcription and of structured models."""

    def refuse(*_: object, **__: object) -> None:
        raise source.OtherPairError("these tests look at operations")

    with pytest.MonkeyPatch.context() as patch:
        if not any(name in request.path.name for name in _BOTH):
            patch.setattr("fmapper.translation.source.transcribe", refuse)
        yield
