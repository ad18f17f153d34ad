"""Every rule of the doctor, one for each code and file."""

from __future__ import annotations

from ..rule import Rule
from .hs101_rows_mix import RULE as HS101
from .hs102_future_seen import RULE as HS102
from .hs103_state_ignored import RULE as HS103
from .hs104_input_ignored import RULE as HS104
from .hs105_gradient_cut import RULE as HS105
from .hs106_padding_counts import RULE as HS106
from .hs107_bidirectional_last_step import RULE as HS107
from .hs108_split_not_whole import RULE as HS108
from .hs109_wrong_slice import RULE as HS109
from .hs110_row_order_lost import RULE as HS110
from .hs111_rows_not_sorted import RULE as HS111
from .hs112_teacher_forcing_in_evaluation import RULE as HS112
from .hs201_state_survives import RULE as HS201
from .hs202_random_start import RULE as HS202
from .hs203_graph_grows import RULE as HS203
from .hs204_one_batch_size import RULE as HS204
from .hs205_not_registered import RULE as HS205
from .hs206_initial_state_untrained import RULE as HS206
from .hs207_changed_in_place import RULE as HS207
from .hs208_validation_leaks import RULE as HS208
from .hs209_other_state_in_training import RULE as HS209
from .hs210_other_resets_in_training import RULE as HS210
from .hs301_double_nonlinearity import RULE as HS301
from .hs302_unused_gate import RULE as HS302
from .hs303_identical_gates import RULE as HS303
from .hs304_beyond_bounds import RULE as HS304
from .hs305_single_layer_dropout import RULE as HS305
from .hs306_shared_weights import RULE as HS306
from .hs401_not_finite import RULE as HS401
from .hs402_saturated import RULE as HS402
from .hs403_dead import RULE as HS403
from .hs404_identical_rows import RULE as HS404
from .hs405_constant_over_time import RULE as HS405
from .hs406_half_precision import RULE as HS406
from .hs501_vanishing_gradient import RULE as HS501
from .hs502_exploding_gradient import RULE as HS502
from .hs503_no_gradient import RULE as HS503
from .hs504_not_in_optimizer import RULE as HS504
from .hs505_clipped_too_late import RULE as HS505

# In the order in which they are run: gravest and most specific first.
RULES: tuple[Rule, ...] = (
    HS401,
    HS207,
    HS203,
    HS201,
    HS202,
    HS110,
    HS111,
    HS109,
    HS101,
    HS107,
    HS103,
    HS104,
    HS209,
    HS112,
    HS105,
    HS106,
    HS102,
    HS108,
    HS204,
    HS206,
    HS205,
    HS504,
    HS301,
    HS304,
    HS303,
    HS302,
    HS306,
    HS403,
    HS402,
    HS404,
    HS405,
    HS406,
    HS502,
    HS501,
    HS503,
    HS305,
    HS208,
    HS210,
    HS505,
)

TITLES = {rule.code: rule.title for rule in RULES}

__all__ = ["RULES", "TITLES"]
