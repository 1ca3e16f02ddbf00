"""Errors that are kept keep nothing else."""

import weakref

from torch._inductor.exc import InductorError

from models.io.errors import drop_frames


class Cache:
    """What a device holds for a shape."""


def test_an_error_that_is_kept_frees_what_its_frames_held():
    held = []

    def decode():
        cache = Cache()
        held.append(weakref.ref(cache))
        try:
            raise MemoryError(f"{type(cache).__name__} does not fit")
        except MemoryError as error:
            raise InductorError(error, None) from error

    kept = None
    try:
        decode()
    except InductorError as error:
        kept = drop_frames(error)
    assert (str(kept), held[0]()) == ("MemoryError: Cache does not fit", None)
