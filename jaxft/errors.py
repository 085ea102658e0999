"""Every error that jaxft raises.

    JaxftError
    ├── ConfigError              an option or a combination of options that cannot work
    ├── LaunchError              the world could not be formed, or could not go on
    │   ├── StoreError           the store is unreachable, locked or unusable
    │   │   └── StoreAway        nobody answers there; perhaps it has not started yet
    │   ├── JobInUse             another agent or process already runs this job on this host
    │   └── ScriptError          the training script ended with an error that a restart cannot mend
    ├── MemoryLimitError         the slots do not fit into the memory there is
    ├── CodecError               a code that is not supported, or blocks that do not fit it
    ├── WireError                a peer or a local channel broke, or sent what it must not send
    │   ├── PeerUnreachable      no answer within the deadline
    │   ├── ChannelClosed        the other process of a local channel is gone
    │   ├── ReadCancelled        a read was ended by whoever asked for it
    │   └── ProtocolError        a message that does not belong to this protocol or generation
    ├── ChunkDamaged             bytes read do not have the checksum they were written with
    ├── SnapshotError            a snapshot was not taken, or not protected
    │   ├── SnapshotSkipped      not due, or not chosen for storage; nothing is wrong
    │   ├── StagingError         a leaf could not be copied to the host
    │   ├── SnapshotAborted      the root decided that this snapshot is not to be
    │   └── SnapshotLost         the SMP or the world ended before the outcome was known
    └── RestoreError             nothing was restored
        ├── TreeMismatch         the target tree does not match the snapshot
        ├── NothingRecoverable   more was lost than memory and storage can give back
        └── RestoreTimeout       nobody answered within the deadline

A message names the host, the step and the leaf it is about, what was expected and what was
found, and what to do next.
"""

from __future__ import annotations


class JaxftError(Exception):
    """The root of the tree: `except JaxftError` catches all of it."""


class ConfigError(JaxftError, ValueError):
    """An option, or a combination of options, that cannot work."""


class LaunchError(JaxftError):
    """The world could not be formed, or could not go on."""


class StoreError(LaunchError):
    """The store is unreachable, locked or unusable."""


class StoreAway(StoreError):
    """Nobody answers where the store is said to be; perhaps it has not started yet."""


class JobInUse(LaunchError):
    """Another agent or process already runs this job on this host."""


class ScriptError(LaunchError):
    """The training script ended with an error that a restart cannot mend."""


class MemoryLimitError(JaxftError):
    """The slots do not fit into the memory there is."""


class CodecError(JaxftError, ValueError):
    """A code that is not supported, or blocks that do not fit it."""


class WireError(JaxftError):
    """A peer or a local channel broke, or sent what it must not send."""


class PeerUnreachable(WireError):
    """No answer within the deadline."""


class ChannelClosed(WireError):
    """The other process of a local channel is gone."""


class ReadCancelled(WireError):
    """A read was ended by whoever asked for it."""


class ProtocolError(WireError):
    """A message that does not belong to this protocol or generation."""


class ChunkDamaged(JaxftError):
    """Bytes read do not have the checksum they were written with."""


class SnapshotError(JaxftError):
    """A snapshot was not taken, or not protected."""


class SnapshotSkipped(SnapshotError):
    """Not due, or not chosen for storage; nothing is wrong."""


class StagingError(SnapshotError):
    """A leaf could not be copied to the host."""


class SnapshotAborted(SnapshotError):
    """The root decided that this snapshot is not to be."""


class SnapshotLost(SnapshotError):
    """The snapshot process or the world ended before the outcome was known."""


class RestoreError(JaxftError):
    """Nothing was restored."""


class TreeMismatch(RestoreError, ValueError):
    """The target tree does not match the snapshot."""


class NothingRecoverable(RestoreError):
    """More was lost than memory and storage can give back."""


class RestoreTimeout(RestoreError):
    """Nobody answered within the deadline."""
