"""Placement, row table and first-cause rules of the controller."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhpc.comm.channel import ChannelClient, ChannelServer
from rlhpc.comm.messages import Failure, Hello
from rlhpc.controller.calls import Calls
from rlhpc.controller.placement import balance, row_bridges, split_mini_batches, spread_groups
from rlhpc.controller.rows import RowTable
from rlhpc.dataflow import grpo_stages, sft_stages
from rlhpc.errors import RunFailedError
from rlhpc.plan import ComponentPlan, RolePlan, RunPlan


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 3), st.integers(0, 5))
def test_every_pass_visits_each_prompt_once(num_prompts, size, epochs, seed):
    updates = split_mini_batches(num_prompts, size, epochs=epochs, seed=seed)
    per_pass = -(-num_prompts // size)
    assert len(updates) == epochs * per_pass
    for e in range(epochs):
        seen = [p for u in updates[e * per_pass : (e + 1) * per_pass] for p in u]
        assert sorted(seen) == list(range(num_prompts))
    assert all(len(u) <= size for u in updates)


@given(st.lists(st.integers(1, 500), max_size=60), st.integers(1, 8))
def test_balanced_bins_hold_each_row_once_and_differ_by_one_row_at_most(lengths, num_bins):
    bins = balance(lengths, num_bins)
    assert sorted(p for b in bins for p in b) == list(range(len(lengths)))
    loads = [sum(lengths[p] for p in b) for b in bins]
    # Longest first to the emptiest bin: the fullest is above the emptiest by at most one row.
    assert max(loads) - min(loads) <= max(lengths, default=0)


@given(st.integers(0, 50), st.integers(1, 9))
def test_groups_are_spread_contiguously_and_evenly(num_groups, num_bins):
    bins = spread_groups(num_groups, num_bins)
    assert [g for b in bins for g in b] == list(range(num_groups))
    assert max(map(len, bins)) - min(map(len, bins)) <= 1


def make_rows():
    rows = RowTable(
        ids=[10, 11, 12, 13], prompts=[0, 0, 1, 1], prompt_indices=[5, 5, 7, 7], seeds=[1, 2, 3, 4]
    )
    rows.places = {"rollout": [4, 4, 5, 5], "actor": [0, 4, 0, 5], "reward": [4, 4, 5, 5]}
    return rows


def test_only_rows_on_another_rank_travel():
    moves = make_rows().moves("rollout", "actor", range(4))
    assert moves == {(4, 0): [0], (5, 0): [2]}
    assert make_rows().moves("rollout", "reward", range(4)) == {}


def test_values_are_set_by_row_id_and_lengths_follow():
    rows = make_rows()
    rows.set_values("length", [13, 10], [9, 4])
    rows.set_values("length", [11, 12], [5, 6])
    rows.set_values("prompt_length", [10, 11, 12, 13], [2, 2, 3, 3])
    assert rows.lengths == [4, 5, 6, 9]
    assert rows.response_lengths == [2, 3, 3, 6]
    assert rows.num_prompts == 2


def make_role(name, kind, ranks, *, tp=1, pp=1):
    dp = len(ranks) // (tp * pp)
    return RolePlan(name, kind, "c", "e", "role", "fp32", dp, tp, pp, tuple(ranks))


def make_run_plan(*roles):
    component = ComponentPlan("c", 0, 1, 1 + max(r for role in roles for r in role.ranks), 0)
    return RunPlan("run", "/run", (component,), roles, total_steps=1)


def test_bridges_join_the_ports_of_roles_that_exchange_rows():
    plan = make_run_plan(
        make_role("actor", "actor", range(8), tp=2, pp=2),
        make_role("reference", "reference", range(8), tp=2, pp=2),
        make_role("rollout", "rollout", range(8, 12), tp=2),
        make_role("reward", "reward", range(8, 12)),
    )
    bridges = row_bridges(plan, grpo_stages(use_reference=True))
    # Rewards are computed on the rollout's leaders; actor and reference place rows alike.
    assert bridges == {"rollout->reference": (8, 10, 4, 6), "rollout->actor": (8, 10, 4, 6)}


def test_colocated_rollout_and_actor_exchange_rows_but_not_on_one_rank():
    two = (make_role("actor", "actor", range(2)), make_role("rollout", "rollout", range(2)))
    reward = make_role("reward", "reward", [2])
    bridges = row_bridges(make_run_plan(*two, reward), grpo_stages(use_reference=False))
    assert bridges == {"rollout->reward": (0, 1, 2), "rollout->actor": (0, 1)}
    one = (make_role("actor", "actor", [0]), make_role("rollout", "rollout", [0]))
    assert row_bridges(make_run_plan(*one), sft_stages()) == {}
    assert row_bridges(make_run_plan(*one), grpo_stages(use_reference=False)) == {}


def test_columns_fetched_by_a_role_serve_those_placed_alike():
    rows = make_rows()
    rows.places["reference"] = list(rows.places["actor"])
    rows.copies = {"reference": {"token_ids"}, "reward": {"loss_mask"}}
    assert rows.copies_at("actor") == {"token_ids"}


def connect(server, rank):
    return ChannelClient(
        [("127.0.0.1", server.port)],
        token="token",
        hello=Hello(rank, f"n{rank}", 1),
        on_message=lambda _: None,
        on_lost=lambda _: None,
        timeout_s=20,
    )


@pytest.mark.parametrize("victim_first", [True, False])
def test_a_victim_is_not_blamed_even_when_the_cause_arrives_beside_its_words(victim_first):
    server = ChannelServer("token", host="127.0.0.1")
    with ThreadPoolExecutor() as pool:
        joining = [pool.submit(connect, server, rank) for rank in (0, 1)]
        server.wait_for_peers({0: "actor", 1: "rollout"}, 20)
        killed, victim = (j.result() for j in joining)
    plan = make_run_plan(make_role("actor", "actor", [0]), make_role("rollout", "rollout", [1]))
    calls = Calls(server, plan)
    calls.issue("update", {0: {}}, stage="update")
    words = Failure(1, "rollout", "n1", "generate", "connection reset by peer", "", True)
    ends = [lambda: victim.send(words), lambda: killed._sock.shutdown(socket.SHUT_RDWR)]
    for end in ends if victim_first else reversed(ends):
        end()
        time.sleep(0.1)  # both are there before the controller looks
    with pytest.raises(RunFailedError, match=r"rank 0 \(actor dp0 tp0 pp0\).*vanished"):
        calls.poll(5.0)
    server.close()
