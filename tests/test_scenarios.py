"""Every failure of KV caches that users of other engines reported has a test here: which one, case by case.

The cases are those of the project's list, word for word. A test that is renamed or deleted is missed here.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

CACHE, TIERS = "test_scenarios_cache.py", "test_scenarios_tiers.py"

CASES: dict[str, tuple[str, ...]] = {
    # Wrong answers
    "the same greedy prompt, cold, then warm, then with 15 strangers in the batch, then after preemption, gives "
    "different text": (
        f"{CACHE}::test_the_same_prompt_cold_then_warm_then_among_strangers_then_after_preemption_gives_the_same_text",
        "engine/test_bit_exact.py::test_no_schedule_changes_a_bit_of_any_answer",
    ),
    "prefill resumed at any split point (mid-block too) differs from one-shot prefill": (
        f"{CACHE}::test_prefill_resumed_at_any_split_point_is_prefill_in_one_piece",
        "engine/test_bit_exact.py::test_a_prompt_resumed_at_any_split_point_is_the_prompt_in_one_piece",
    ),
    "a restored block is read before its load finished; a load overwrites a block that a running request still reads": (
        f"{TIERS}::test_a_block_is_not_read_before_its_load_has_finished",
        f"{TIERS}::test_a_load_does_not_overwrite_a_block_that_a_running_request_reads",
    ),
    "part of a restored prefix is missing (evicted between the existence check and the read), yet the full length is "
    "used": (f"{TIERS}::test_the_length_used_is_what_was_loaded_and_not_what_was_said_to_be_there",),
    "a block index is re-used while an old reference to it lives: the previous prompt's answer appears": (
        f"{CACHE}::test_a_reference_to_blocks_that_were_given_back_is_an_error_and_not_an_answer",
    ),
    "a transfer fails and the server answers 200 with garbage": (
        f"{TIERS}::test_a_transfer_that_fails_costs_no_answer_and_yields_no_garbage",
    ),
    "an adapter reloaded under the same name reuses the old adapter's KV; a tier's key leaves out the adapter, the KV "
    "dtype or the layout; an adapter's name equals another tenant's salt": (
        f"{TIERS}::test_an_adapter_that_was_reloaded_under_its_name_does_not_find_the_old_ones_kv",
        f"{TIERS}::test_what_a_key_leaves_out_nobody_shares",
        f"{CACHE}::test_an_adapters_name_that_equals_another_tenants_salt_shares_nothing_with_it",
    ),
    "weights reloaded; KV of the old weights reused": (
        f"{TIERS}::test_weights_that_were_reloaded_do_not_find_the_old_weights_kv",
        "engine/test_restarts.py::test_weights_that_changed_under_the_same_name_never_find_it",
    ),
    "a sliding-window model: a warm prompt whose window blocks were freed is treated as a full hit": (
        f"{CACHE}::test_a_warm_prompt_whose_window_blocks_were_freed_is_no_full_hit_and_the_second_time_is_one",
    ),
    "prompt logprobs with a warm prefix: missing or misaligned": (
        f"{CACHE}::test_prompt_logprobs_of_a_warm_prefix_are_those_of_a_cold_one_and_say_what_they_cost",
        "engine/test_speculation.py::test_prompt_logprobs_are_right_also_when_the_prompt_is_cached",
        "engine/test_meeting.py::test_scores_of_the_prompt_are_all_computed",
    ),
    'a slot file is restored "ok" and the next request recomputes all of it': (
        "server/test_llamacpp.py::test_a_slot_that_was_saved_is_restored_by_another_server_and_its_conversation_is_warm",
        "server/test_llamacpp.py::test_a_file_that_is_not_as_it_was_saved_is_refused",
        f"{TIERS}::test_a_slot_file_for_which_there_is_no_room_is_told_to_be_restored_as_far_as_it_is",
    ),
    "sliding window: prompt at window-1, window, window+1 and 3 windows; draft bursts across the edge; the same prompt "
    "twice": (
        f"{CACHE}::test_a_warm_prompt_whose_window_blocks_were_freed_is_no_full_hit_and_the_second_time_is_one",
        "engine/test_speculation.py::test_bursts_of_drafts_across_a_windows_edge_are_right_and_the_second_time_is_a_hit",
    ),
    "positions of a reused or imported cache inferred wrongly, silently": (
        f"{TIERS}::test_an_import_whose_positions_do_not_follow_is_refused",
    ),
    "quantised KV ruins some models (a judge's score fell from 4.6 to 1.1 over several turns)": (
        "engine/test_kv_int8.py::test_a_model_that_int8_would_ruin_is_refused",
        "engine/test_kv_int8.py::test_the_gate_warns_above_its_lower_threshold",
    ),
    # Lost or leaked memory
    "59 of 270,331 tokens gone after a day; a sum that exceeds the pool by 4,224": (
        f"{CACHE}::test_tokens_that_are_gone_are_missed_at_the_step_that_lost_them",
    ),
    "admission fails after part of the blocks were taken": (
        f"{CACHE}::test_an_admission_that_fails_half_way_gives_back_everything",
    ),
    "client disconnects: during queueing, mid-prefill, mid-decode, while a restore is in flight": (
        f"{CACHE}::test_a_thousand_aborts_at_random_moments_leave_the_pool_as_it_was_found",
        f"{TIERS}::test_a_client_that_goes_while_its_restore_is_in_flight_gives_all_blocks_back",
        f"{TIERS}::test_clients_that_go_at_any_moment_of_their_restores_leave_nothing_behind",
        "server/test_streams.py::test_a_thousand_random_aborts_leave_the_pool_as_it_was",
    ),
    "release given the wrong boundary lowers somebody else's lock": (
        f"{CACHE}::test_blocks_cannot_be_released_by_a_boundary_only_by_their_lease_and_once",
    ),
    "rejected draft tokens freed twice, or cached before acceptance": (
        f"{CACHE}::test_drafts_that_are_wrong_are_neither_cached_nor_freed_twice",
    ),
    "the pool is full and every allocation waits for a free that only new work would trigger": (
        f"{CACHE}::test_a_full_pool_is_reaped_without_new_work",
        f"{CACHE}::test_a_request_that_can_never_fit_fails_at_once_and_names_its_need_and_the_limit",
    ),
    "preemption storm: after one, throughput falls from 429 to 20-38 tok/s and stays": (
        f"{CACHE}::test_after_a_storm_of_preemptions_throughput_recovers",
    ),
    "a cache limit of 8 GiB holds 30, or 222, because one entry was larger or its side state was not counted": (
        f"{TIERS}::test_a_limit_in_bytes_is_one_whatever_an_entry_weighs",
    ),
    "last request cannot fit and takes the whole server down": (
        f"{CACHE}::test_the_request_that_cannot_fit_takes_nobody_with_it",
    ),
    # Hits that should have been, and are not
    "a 240-token prefix under a 784-token block, a 1,000-token prompt that differs in its last token: 0 % and no word "
    "why": (
        f"{CACHE}::test_a_long_prompt_that_differs_in_its_last_token_is_reused_to_the_token_and_says_why_not_more",
    ),
    "only the prompt is kept, so turn 2 re-reads the reply": (
        f"{CACHE}::test_the_reply_is_kept_and_not_only_the_prompt",
    ),
    "two requests with the same 4,000-token prefix arrive together and both compute it": (
        f"{CACHE}::test_two_requests_with_the_same_long_prefix_that_arrive_together_compute_it_once",
    ),
    "speculation costs a block per hit (92 % falls to 71 %)": (
        f"{CACHE}::test_drafting_never_lowers_the_hit_rate",
        "engine/test_speculation.py::test_drafts_take_no_cached_block",
    ),
    "0 hits from another process or after a restart, because a hash was seeded at random": (
        f"{CACHE}::test_keys_are_the_same_in_another_process_whatever_its_hash_seed",
        "engine/test_restarts.py::test_the_next_turn_after_a_restart_is_warm_and_equal_to_the_bit",
        "server/test_session_restart.py::test_after_a_kill_every_models_sessions_are_listed_and_go_on_from_what_was_computed",
    ),
    "a reply re-rendered by the chat template differs from the tokens generated (think blocks, spaces, tool-call "
    "JSON), so the next turn misses from there": (
        f"{TIERS}::test_a_reply_that_a_template_would_render_otherwise_is_reused_in_a_session_after_a_restart",
        "server/test_explain.py::test_history_that_the_template_renders_otherwise_is_template_drift",
    ),
    "a header that changes on each request (date, random id) at the start of the system prompt": (
        "server/test_explain.py::test_a_nonce_in_the_system_message_is_named_by_message_and_field",
    ),
    "a client times out in a 900 s prefill, retries, and it starts from nothing": (
        f"{CACHE}::test_a_client_that_times_out_in_its_prefill_and_retries_goes_on_from_there",
        f"{TIERS}::test_what_a_client_had_computed_before_it_gave_up_is_there_after_a_restart",
    ),
    "four branches of one 7,400-token trunk arrive at once: nobody shares": (
        f"{CACHE}::test_four_branches_of_one_trunk_that_arrive_at_once_compute_the_trunk_once",
        f"{TIERS}::test_four_branches_of_one_trunk_that_lies_in_a_tier_bring_it_up_once",
    ),
    "a short request that matches 10 % takes over the long conversation's place": (
        f"{CACHE}::test_a_short_request_that_matches_a_tenth_does_not_take_over_the_long_conversations_place",
    ),
    "the client re-sends tool arguments with keys in another order, drops or empties the reasoning field, moves a "
    "reminder message": (
        "models/test_template_lint.py::test_what_clients_do_to_a_prefix_is_told_by_message_and_field",
        "server/test_conversations.py::test_the_field_that_differs_is_named",
        "server/test_canonical.py::test_with_it_a_nonce_no_longer_costs_the_prefix_and_usage_says_so",
    ),
    "one layer kind that cannot be trimmed voids the whole cache": (
        f"{CACHE}::test_one_kind_of_layer_that_holds_little_does_not_void_the_others",
    ),
    "recomputation after preemption counted as hits; hits counted with no denominator": (
        f"{CACHE}::test_what_is_found_again_after_a_preemption_is_no_hit_and_hits_have_a_denominator",
    ),
    # Stuck
    "decode side waits for ever for blocks that the prefill side evicted before sending": (
        f"{TIERS}::test_blocks_on_their_way_to_a_tier_that_are_evicted_meanwhile_arrive_all_the_same",
        "engine/test_tiering.py::test_a_tier_that_hangs_delays_a_request_for_a_while_and_the_next_not_at_all",
    ),
    'a retried transfer picks up the earlier attempt\'s "done"': (
        f"{TIERS}::test_a_restore_that_is_tried_again_is_not_done_when_the_earlier_one_is",
    ),
    "a storage backend that hangs, is slow, fills its disk, loses its connection, comes back": (
        f"{TIERS}::test_a_transfer_that_fails_costs_no_answer_and_yields_no_garbage",
        f"{TIERS}::test_a_full_disk_costs_no_answer",
        f"{TIERS}::test_a_store_that_went_away_is_asked_again_and_its_state_is_shown",
        "engine/test_tiering.py::test_a_slow_tier_does_not_hold_up_others",
        "tiers/test_faults.py::test_requests_are_answered_right_before_during_and_after",
        "tiers/test_faults.py::test_faults_that_come_and_go_under_traffic_change_no_answer",
        "tiers/test_faults.py::test_an_engine_whose_tier_is_in_trouble_at_the_start_starts_and_uses_it_later",
    ),
    "two first-in-queue requests each waiting for the other's prefix": (
        f"{CACHE}::test_two_requests_first_in_the_queue_that_could_wait_for_each_others_prefix_both_go_on",
        f"{TIERS}::test_who_waits_for_what_another_brings_up_goes_on_when_that_one_leaves",
    ),
    # Strangers
    "one tenant's time to first token reveals another's prompts": (
        f"{CACHE}::test_a_tenants_first_token_tells_nothing_of_another_tenants_prompts",
    ),
    "one tenant floods the cache; a neighbour's time to first token rises ninefold": (
        f"{CACHE}::test_a_tenant_that_floods_the_cache_does_not_touch_its_neighbours",
        "engine/test_fairness.py::test_a_neighbour_is_not_kept_waiting_by_a_flood",
    ),
    "a file in the cache folder truncated, bit-flipped, swapped with another, or made by an older version": (
        f"{TIERS}::test_a_file_in_the_folder_that_is_not_what_it_was_is_a_miss_counted_and_logged",
        f"{TIERS}::test_a_file_that_cannot_be_read_fails_once_and_does_not_keep_the_folder_from_being_used",
        "engine/test_session_files.py::test_what_was_damaged_or_swapped_is_no_session",
    ),
}


@cache
def names_in(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("case", CASES)
def test_the_case_has_its_tests(case):
    assert CASES[case]
    for test in CASES[case]:
        file, _, name = test.partition("::")
        assert name in names_in(TESTS / file), f"{test} is gone"


def test_no_scenario_is_tested_that_is_no_case():
    """What is in the scenarios' own files belongs to a case."""
    mapped = {test for tests in CASES.values() for test in tests}
    for file in (CACHE, TIERS):
        names = {f"{file}::{name}" for name in names_in(TESTS / file) if name.startswith("test_")}
        assert names - mapped <= {f"{TIERS}::test_a_session_file_of_another_model_is_not_taken_for_ones_own"}
