"""Arguments of kernels: a kernel itself checks nothing."""

from npmoe.dtypes import Array


def check_array(name: str, array: Array, dtype: type, *shape: int | None) -> None:
    """Raises ValueError unless `array` is C-contiguous, of this dtype and shape; None fits any."""
    fits = len(array.shape) == len(shape) and all(
        want is None or have == want for have, want in zip(array.shape, shape, strict=True)
    )
    if array.dtype != dtype or not fits or not array.flags.c_contiguous:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        layout = "" if array.flags.c_contiguous else ", not contiguous"
        raise ValueError(
            f"{name}: expected {dtype.__name__} [{wanted}], C-contiguous; "
            f"got {array.dtype} {list(array.shape)}{layout}"
        )
