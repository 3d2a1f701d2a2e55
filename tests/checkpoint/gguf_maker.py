"""GGUF files of tests."""

from __future__ import annotations

import gguf


def finish(writer: gguf.GGUFWriter) -> None:
    """Write everything that the writer was told of."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
