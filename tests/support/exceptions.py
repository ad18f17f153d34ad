"""What does not yet keep to the rules of the house. These tables may only get shorter: tests hold how long they are.

A test fails as well where a line is no longer needed. `python -m tests.support.source --write` renews them.
"""

# Class names, underscores in front left out, and how many classes have each.
SEVERAL_MEANINGS = {
    "Memory": 2,
    "Places": 2,
    "Split": 2,
    "Task": 2,
    "Trace": 2,
    "Writer": 2,
}

# Files that import each other, at least one of them within a function.
CYCLES: list[tuple[str, ...]] = []

# Files in the longest chain of names, each defined in one and used by the one before.
DEPTH = 30

# The same for what `import hiddenstate` loads; httpx has 10, in one part.
DEPTH_OF_THE_FRONT_DOOR = 18

# Files without a test file of their own, and the one that covers each; `covered.py` says why.
COVERED_ELSEWHERE = {
    "carry/handover.py": "carry/test_carry.py",
    "carry/kept.py": "carry/test_carry.py",
    "carry/replays.py": "carry/test_carry.py",
    "cells/behavior/analysis.py": "cells/behavior/test_decoys.py",
    "cells/behavior/candidates.py": "cells/behavior/test_attributes.py",
    "cells/behavior/found.py": "cells/behavior/test_replay.py",
    "cells/behavior/handed_back.py": "cells/behavior/test_order.py",
    "cells/behavior/influence.py": "cells/behavior/test_order.py",
    "cells/behavior/overriding.py": "cells/behavior/test_search.py",
    "diagnosis/rule.py": "diagnosis/test_rules.py",
    "diagnosis/rules/hs101_rows_mix.py": "diagnosis/test_rules.py",
    "diagnosis/rules/hs102_future_seen.py": "diagnosis/test_rules.py",
    "diagnosis/rules/hs103_state_ignored.py": "diagnosis/test_rules.py",
    "diagnosis/rules/hs104_input_ignored.py": "diagnosis/test_rules.py",
    "diagnosis/rules/hs105_gradient_cut.py": "diagnosis/test_rules.py",
    "diagnosis/rules/hs106_padding_counts.py": "diagnosis/test_rules.py",
    "diagnosis/rules/hs107_bidirectional_last_step.py": "diagnosis/test_rules.py",
    "diagnosis/rules/hs108_split_not_whole.py": "diagnosis/test_rules.py",
    "diagnosis/rules/hs109_wrong_slice.py": "diagnosis/test_rules.py",
    "diagnosis/rules/hs110_row_order_lost.py": "diagnosis/test_rules.py",
    "diagnosis/rules/hs201_state_survives.py": "diagnosis/test_rules.py",
    "diagnosis/rules/hs202_random_start.py": "diagnosis/test_rules.py",
    "diagnosis/rules/hs203_graph_grows.py": "diagnosis/test_rules.py",
    "diagnosis/rules/hs204_one_batch_size.py": "diagnosis/test_rules.py",
    "diagnosis/rules/hs205_not_registered.py": "diagnosis/test_rules.py",
    "diagnosis/rules/hs206_initial_state_untrained.py": "diagnosis/test_rules.py",
    "diagnosis/rules/hs207_changed_in_place.py": "diagnosis/test_rules.py",
    "diagnosis/rules/hs301_double_nonlinearity.py": "diagnosis/test_rules.py",
    "diagnosis/rules/hs302_unused_gate.py": "diagnosis/test_rules.py",
    "diagnosis/rules/hs303_identical_gates.py": "diagnosis/test_rules.py",
    "diagnosis/rules/hs304_beyond_bounds.py": "diagnosis/test_rules.py",
    "diagnosis/rules/hs305_single_layer_dropout.py": "diagnosis/test_rules.py",
    "diagnosis/rules/hs401_not_finite.py": "diagnosis/test_rules.py",
    "diagnosis/rules/hs402_saturated.py": "diagnosis/test_rules.py",
    "diagnosis/rules/hs403_dead.py": "diagnosis/test_rules.py",
    "diagnosis/rules/hs404_identical_rows.py": "diagnosis/test_rules.py",
    "diagnosis/rules/hs405_constant_over_time.py": "diagnosis/test_rules.py",
    "diagnosis/rules/hs501_vanishing_gradient.py": "diagnosis/test_rules.py",
    "diagnosis/rules/hs502_exploding_gradient.py": "diagnosis/test_rules.py",
    "diagnosis/rules/hs503_no_gradient.py": "diagnosis/test_rules.py",
    "diagnosis/rules/hs504_not_in_optimizer.py": "diagnosis/test_rules.py",
    "unrolling/cache.py": "unrolling/test_fast.py",
    "unrolling/engines.py": "unrolling/test_checks.py",
    "unrolling/explain.py": "unrolling/test_fast.py",
    "unrolling/native/factors.py": "unrolling/test_rewriting.py",
    "unrolling/native/grouping.py": "unrolling/native/test_rows.py",
    "unrolling/native/inlining.py": "unrolling/test_rewriting.py",
    "unrolling/native/kernel.py": "unrolling/native/test_products.py",
    "unrolling/native/memory.py": "unrolling/test_rewriting.py",
    "unrolling/native/page.py": "unrolling/native/test_rows.py",
    "unrolling/native/prelude.py": "unrolling/test_rewriting.py",
    "unrolling/native/runner.py": "unrolling/test_rewriting.py",
    "unrolling/native/values.py": "unrolling/test_rewriting.py",
    "unrolling/native/writing.py": "unrolling/test_rewriting.py",
    "unrolling/onchip/compiling.py": "unrolling/onchip/test_runner.py",
    "unrolling/onchip/instructions.py": "unrolling/onchip/test_runner.py",
    "unrolling/onchip/kernel.py": "unrolling/onchip/test_runner.py",
    "unrolling/onchip/plan.py": "unrolling/onchip/test_runner.py",
    "unrolling/onchip/prelude.py": "unrolling/onchip/test_runner.py",
    "unrolling/onchip/writing.py": "unrolling/onchip/test_runner.py",
    "unrolling/pieces.py": "unrolling/test_rewriting.py",
    "unrolling/reaching.py": "unrolling/test_fast.py",
    "unrolling/reasons.py": "unrolling/test_fast.py",
    "unrolling/scan.py": "unrolling/native/test_rows.py",
    "unrolling/schedule.py": "unrolling/test_fast.py",
    "unrolling/split.py": "unrolling/onchip/test_runner.py",
    "unrolling/stacking.py": "unrolling/test_opened.py",
    "unrolling/step.py": "unrolling/test_fast.py",
    "unrolling/sums.py": "unrolling/test_fast.py",
    "unrolling/sweep.py": "unrolling/onchip/test_runner.py",
    "unrolling/tracing.py": "unrolling/test_fast.py",
    "unrolling/twins.py": "unrolling/test_observing.py",
    "unrolling/unguarded.py": "unrolling/test_reading.py",
    "unrolling/waiting.py": "unrolling/test_recurrent.py",
}
