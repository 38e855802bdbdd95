"""Local copies of the newest checkpoint: restarted ranks read them if their digests match."""

from __future__ import annotations

from pathlib import Path

import pytest

from primeslurm.trainer.checkpoints.local_copies import Transfer, missing, replica_ranks
from primeslurm.trainer.checkpoints.shards import CopyFile
from tests.trainer.conftest import finish, printed, start_ranks


def test_next_node_keeps_copies() -> None:
    assert replica_ranks(["a", "a", "b", "b", "c", "c"]) == [2, 3, 4, 5, 0, 1]
    assert replica_ranks(["a", "b", "b"]) == [1, 0, 0], "nodes of unlike size"
    assert replica_ranks(["a", "a"]) == [None, None], "there is no other"


def test_lost_copies_come_from_the_replica() -> None:
    nodes, shards = ["a", "a", "b", "b"], {"__0_0.distcp": 7, "__1_0.distcp": 8, "__2_0.distcp": 9, "__9_0.distcp": 1}
    kept = [{"__2_0.distcp": 9}, {}, {"__2_0.distcp": 9, "__0_0.distcp": 7}, {"__1_0.distcp": 5}]
    assert missing(nodes, kept, shards) == [Transfer(2, 0, "__0_0.distcp", 7)], "rank 1's is not whole, 9 is gone"
    kept[1] = {"__0_0.distcp": 7}
    assert missing(nodes, kept, shards) == [], "another rank of the node has it"
    assert missing(nodes, [{}, {}, {}, {}], shards) == []


def test_failed_copy_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with CopyFile(tmp_path / "file" / "copy") as copy:
        copy.write(b"data")
    full = tmp_path / "full"
    full.symlink_to("/dev/full")  # every write fails: no space left on device
    with CopyFile(full) as copy:
        copy.write(b"data")
        copy.write(b"more")
    assert not full.is_symlink(), "half of a file takes only space"
    with CopyFile(None) as copy:
        copy.write(b"data")
    with CopyFile(tmp_path / "node" / "copy") as copy:
        copy.write(b"data")
    assert not (tmp_path / "node").exists(), "an agent has removed it"
    with pytest.raises(ValueError, match="the original"), CopyFile(tmp_path / "of nothing") as copy:
        raise ValueError("the original could not be written")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_restarted_ranks_read_valid_copies(tmp_path: Path) -> None:
    """Three ranks on three nodes: same nodes, a replaced node, a truncated copy, two replaced nodes."""
    (output,) = finish(start_ranks(1, "tests.trainer.checkpoints.restarted_ranks", str(tmp_path)))
    (actual,) = printed(output, "FRACTIONS")
    assert actual["first"] == [0, 0, 0], "there is no checkpoint"
    # Replicated state is in one rank's file. Each rank's own tensor is nearly everything that it reads.
    near = {name: [share > 0.9 for share in shares] for name, shares in actual.items()}
    assert near["same nodes"] == [True, True, True], actual
    assert near["node 1 is another"] == [True, True, True], "rank 1's comes from node 2"
    assert near["copies are torn"] == [False, True, True], "rank 0's has its size alone, rank 2's comes from node 0"
    assert near["nodes 1 and 2 are others"] == [True, False, True], "rank 1's keeper is gone, too"
    assert actual["copies are torn"][0] < 0.1 > actual["nodes 1 and 2 are others"][1]
