"""Would the tests of tensor parallelism notice? Each fault is planted inside the ranks, and an oracle must fail there.

The faults and the oracles are those of ``rank_mutants.py``. A hang or a crash of the ranks would count as caught for a
fault, but none of these gets that far; it never counts for a control.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import rank_mutants
from oracles import random_folder
from parallel_tools import VOCAB
from ranks import RankPool


@dataclass(frozen=True)
class Mutant:
    """A row of the table.

    Attributes:
        fault: a planter of ``rank_mutants``.
        oracle: the oracle that must fail then.
        says: pattern of the words that it must fail with, on one rank at least.
    """

    fault: str
    oracle: str
    says: str


TABLE = (
    Mutant("no_all_reduce_after_row_parallel", "check_logits", "the logits differ"),
    Mutant("bias_of_every_rank", "check_logits", "the logits differ"),
    Mutant("k_proj_of_the_mirrored_rank", "check_logits", "the logits differ"),
    Mutant("up_proj_of_the_mirrored_rank", "check_logits", "the logits differ"),
    Mutant("every_id_is_mine", "check_logits", "the logits differ"),
    Mutant("logits_gathered_in_reversed_order", "check_logits", "the logits differ"),
    Mutant("padding_not_cut", "check_logits", r"the logits have shape \[\d+, 100\]"),
    Mutant("log_sum_exp_with_the_local_max", "check_log_sum_exp", "the log-sum-exps differ"),
    Mutant("padding_counts", "check_log_sum_exp", "the log-sum-exps differ"),
    Mutant("range_check_removed", "check_ids", "id -1 outside the vocabulary is accepted"),
    Mutant("ids_checked_against_the_local_vocabulary", "check_ids", "id 25 of the vocabulary is refused"),
    Mutant("whole_tensor_read", "check_bytes", "bytes are read for"),
    Mutant("view_instead_of_a_copy", "check_state_dict_is_copied", "the model changes with the dict"),
    Mutant("view_instead_of_a_copy", "check_file_is_copied", "the model changes with the file"),
    Mutant("tensor_set_check_removed", "check_tensor_set", "one tensor too many is loaded"),
)
SIZE = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
    return random_folder("qwen3", tmp_path_factory.mktemp("model"), vocab_size=VOCAB, dtype="bfloat16", **heads)


@pytest.mark.parametrize("mutant", TABLE, ids=lambda mutant: f"{mutant.fault}-{mutant.oracle}")
def test_a_planted_fault_is_caught(rank_pool: RankPool, folder: Path, mutant: Mutant) -> None:
    control = rank_pool.run(rank_mutants.run_planted, None, mutant.oracle, folder, size=SIZE)
    assert control == [(None, 0)] * SIZE
    outcomes = rank_pool.run(rank_mutants.run_planted, mutant.fault, mutant.oracle, folder, size=SIZE)
    assert any(num_reached for _, num_reached in outcomes), "the fault does no harm"
    words = [said for said, _ in outcomes if said is not None]
    assert words, "nobody notices"
    assert any(re.search(mutant.says, said) for said in words), words
