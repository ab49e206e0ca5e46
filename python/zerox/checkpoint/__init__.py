"""Checkpoints: sharded, atomic, checksummed; written on any number of ranks and loaded on any other, at any stage.

A checkpoint is a folder of safetensors files, one per (rank, frozen | weights | state), and `manifest.json`, which says
for every run of elements: parameter, box, place in the box, file, offset, checksum. `manifest` reads and checks it,
`saving` and `loading` hold the two collective operations, `files` writes and reads bytes, `export` writes and reads
weights as plain safetensors.
"""

from zerox.checkpoint.export import consolidate, read_weights
from zerox.checkpoint.loading import load
from zerox.checkpoint.manifest import CheckpointError, Manifest, find
from zerox.checkpoint.saving import save

__all__ = ["CheckpointError", "Manifest", "consolidate", "find", "load", "read_weights", "save"]
