"""The script that applies transformers' own tests, without them: what it says, and how it counts."""

import subprocess
import sys
from pathlib import Path

from benchmarks import transformers_suite

SCRIPT = Path(transformers_suite.__file__)


def test_a_folder_without_the_tests_is_refused(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, "--transformers-tests", tmp_path], capture_output=True, text=True)
    assert done.returncode == 2
    assert "has no tests/test_modeling_common.py; --help says how to make such a folder" in done.stderr


def test_what_is_skipped_here_and_not_there_is_shown(capsys):
    outcomes = {
        "Test_Llama::test_a": ("passed", ""),
        "Test_Llama::test_b": ("skipped", "needs a GPU"),
        "Test_sas_causal::test_a": ("skipped", "no such thing here"),
        "Test_sas_causal::test_b": ("skipped", "needs a GPU"),
        "Test_sas_causal::test_c": ("failed", "two is not three"),
        "Test_sas_causal::test_sdpa_padding_matches_padding_free_with_position_ids": ("passed", ""),
        "Test_Llama::test_sdpa_padding_matches_padding_free_with_position_ids": ("passed", ""),
    }
    transformers_suite.show(outcomes)
    shown = capsys.readouterr().out
    assert "sas_causal                               1       1        2" in shown
    assert "failed: Test_sas_causal::test_c: two is not three" in shown
    assert "skipped here and not there, 1 cases: test_a (no such thing here)" in shown
    assert "test_b (needs" not in shown
    flagged = "test_sdpa_padding_matches_padding_free_with_position_ids, passed"
    assert f"run here with _supports_attention_backend set for it alone, 1 cases: {flagged}" in shown


FAILED_AT_FIRST = {
    "test_assisted_decoding_matches_greedy_search_0_random": "test_a_second_model_that_guesses_ahead",
    "test_assisted_decoding_matches_greedy_search_1_same": "test_a_second_model_that_guesses_ahead",
    "test_assisted_decoding_sample": "test_a_second_model_that_guesses_ahead",
    "test_attention_outputs": "test_matrices_are_those_of_the_equations",
    "test_beam_sample_generate_dict_output": "test_beams_with_a_cache_are_beams_without",
    "test_beam_search_generate_dict_output": "test_beams_with_a_cache_are_beams_without",
    "test_beam_search_generate_dict_outputs_use_cache": "test_beams_with_a_cache_are_beams_without",
    "test_causal_lm_loss_honors_shift_labels": "test_shifted_labels",
    "test_generate_continue_from_inputs_embeds": "test_text_that_began_as_embeddings_goes_on_from_its_cache",
    "test_generate_from_inputs_embeds_0_greedy": "test_generate_goes_on_from_embeddings",
    "test_generate_from_inputs_embeds_1_beam_search": "test_embeddings_that_are_no_tokens",
    "test_generate_from_random_inputs_embeds": "test_embeddings_that_are_no_tokens",
    "test_gradient_checkpointing_enable_disable": "test_gradient_checkpointing_gives_the_same_gradients",
    "test_greedy_generate_dict_outputs": "test_states_and_matrices_of_each_step_are_those_of_the_text",
    "test_greedy_generate_dict_outputs_use_cache": "test_states_and_matrices_of_each_step_are_those_of_the_text",
    "test_hidden_states_output": "test_states_and_matrices_of_every_model",
    "test_load_with_mismatched_shapes": "test_weights_of_another_shape",
    "test_model_outputs_equivalence": "test_a_tuple_is_the_output_in_its_order",
    "test_resize_embeddings_untied_no_reinit_on_post_init": "test_nothing_is_initialised_twice",
    "test_retain_grad_hidden_states_attentions": "test_states_and_matrices_have_gradients",
    "test_sample_generate_dict_output": "test_states_and_matrices_of_each_step_are_those_of_the_text",
    "test_training_gradient_checkpointing": "test_gradient_checkpointing_gives_the_same_gradients",
    "test_training_gradient_checkpointing_use_reentrant_false": "test_gradient_checkpointing_gives_the_same_gradients",
    "test_training_gradient_checkpointing_use_reentrant_true": "test_gradient_checkpointing_gives_the_same_gradients",
}
"""Each test of transformers' that the classes of 0.1.0 failed in this harness → one of ours that they fail, too."""


def test_what_failed_at_first_has_a_test_of_our_own():
    """For that folder of tests is not everywhere, and these are."""
    sources = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py")]
    for ours in FAILED_AT_FIRST.values():
        assert sum(f"def {ours}(" in source for source in sources) == 1, ours
