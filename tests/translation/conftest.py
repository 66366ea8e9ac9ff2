"""Tests of files that are written from operations."""

from collections.abc import Iterator

import pytest

from fmapper.translation import source


@pytest.fixture(autouse=True, scope="module")
def only_operations(request: pytest.FixtureRequest) -> Iterator[None]:
    """Has `source` and the command transcribe nothing, but in the tests of transcription."""

    def refuse(*_: object) -> None:
        raise source.OtherPairError("these tests look at operations")

    with pytest.MonkeyPatch.context() as patch:
        if "transcri" not in request.path.name:
            patch.setattr("fmapper.translation.source.transcribe", refuse)
        yield
