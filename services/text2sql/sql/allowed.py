"""What a statement may be made of: names of syntax nodes, functions and types. Nothing else runs.

Left out on purpose: whatever reads or writes files, the network, settings, sequences, sessions or
large objects, whatever waits or locks, whatever makes long values from short ones (`repeat`,
`lpad`, `zeroblob`), and functions that give rows (`generate_series`, `json_each`, `pragma_*`).
"""

from sqlglot import exp

_SYNTAX = """
Select Subquery Union Intersect Except CTE With From Join Where Group Having Order Ordered Limit
Offset Fetch Distinct Alias TableAlias Column Identifier Table Star Literal National Boolean Null
Tuple Values Paren Var Interval Window WindowSpec Filter WithinGroup Collate AtTimeZone Cube Rollup
GroupingSets Qualify IgnoreNulls RespectNulls DataType DataTypeParam
And Or Xor Not EQ NEQ GT GTE LT LTE NullSafeEQ NullSafeNEQ Is In Between Like ILike SimilarTo Glob
RegexpLike RegexpILike Escape Exists Any All Add Sub Mul Div IntDiv Mod Neg DPipe
BitwiseAnd BitwiseOr BitwiseXor BitwiseNot BitwiseLeftShift BitwiseRightShift
Case If Cast TryCast Coalesce Nullif
JSONExtract JSONExtractScalar JSONBExtract JSONBExtractScalar JSONPath JSONPathRoot JSONPathKey
JSONPathSubscript Array
"""
_FUNCTIONS = """
Abs Avg Ceil Floor Concat ConcatWs Count CountIf CurrentDate CurrentTime CurrentTimestamp
CurrentDatetime Date DateAdd DateSub DateDiff DateTrunc TimestampTrunc TimestampAdd TimestampSub
TimestampDiff Extract Year Month Day DayOfWeek DayOfYear Week Quarter LastDay
GroupConcat Greatest Least Length Ln Log Exp Sqrt Pow Sign Lower Upper Initcap Max Min Sum Round
Trunc Trim Left Right Substring StrPosition SplitPart Replace Reverse Translate Ascii Chr Unicode
Stddev StddevPop StddevSamp Variance VariancePop Corr CovarPop CovarSamp PercentileCont
PercentileDisc Median Mode LogicalAnd LogicalOr ArrayAgg ArraySize
RowNumber Rank DenseRank PercentRank CumeDist Ntile Lag Lead FirstValue LastValue NthValue
StrToDate StrToTime TimeToStr TimeStrToTime TimeStrToDate ToChar ToNumber TsOrDsToDate
TsOrDsToTimestamp TsOrDsAdd TsOrDiToDi UnixToTime TimeToUnix Timestamp Typeof Rand
JSONExtractArray JSONJSONType
"""
_ANONYMOUS = {
    "sqlite": """
abs avg ceil ceiling char coalesce concat concat_ws count cume_dist date datetime
dense_rank first_value floor group_concat hex ifnull iif instr json_array_length
json_extract json_type json_valid julianday lag last_value lead length like likely ln log log10
log2 lower ltrim max min mod nth_value ntile nullif percent_rank pi pow power quote rank replace
round row_number rtrim sign soundex sqrt strftime string_agg substr substring sum time timediff
total trim trunc typeof unicode unixepoch unlikely upper
""",
    "postgres": """
abs age array_length array_to_string avg bool_and bool_or btrim cardinality cbrt ceil ceiling
char_length clock_timestamp coalesce concat concat_ws count cume_dist date date_part date_trunc
degrees dense_rank div every exp extract first_value floor greatest initcap isfinite
json_array_length json_typeof jsonb_array_length jsonb_typeof justify_days justify_hours
justify_interval lag last_value lead least left length ln log log10 lower ltrim make_date max md5
min mod mode nth_value ntile nullif now num_nonnulls num_nulls octet_length percent_rank
percentile_cont percentile_disc pi position power rank regexp_match regexp_replace regexp_substr
replace reverse right round row_number rtrim sign split_part sqrt stddev stddev_pop stddev_samp
starts_with string_agg strpos substr substring sum to_char to_date to_number to_timestamp
translate trim trunc upper var_pop var_samp variance width_bucket
""",
}
_TYPES = """
TINYINT SMALLINT INT BIGINT UTINYINT USMALLINT UINT UBIGINT FLOAT DOUBLE DECIMAL BOOLEAN TEXT CHAR
VARCHAR NCHAR NVARCHAR DATE TIME TIMETZ DATETIME TIMESTAMP TIMESTAMPTZ TIMESTAMPLTZ TIMESTAMPNTZ
INTERVAL JSON JSONB UUID YEAR NULL
"""


def _classes(names: str) -> frozenset[type[exp.Expr]]:
    found = (getattr(exp, name, None) for name in names.split())
    return frozenset(one for one in found if isinstance(one, type))


NODES = _classes(_SYNTAX) | _classes(_FUNCTIONS)
"""Classes of syntax nodes; a subclass of an allowed class is not allowed by that."""
FUNCTIONS = {dialect: frozenset(names.split()) for dialect, names in _ANONYMOUS.items()}
"""Dialect -> functions that sqlglot knows by name only."""
TYPES = frozenset(
    getattr(exp.DataType.Type, name) for name in _TYPES.split() if hasattr(exp.DataType.Type, name)
)
"""Types that a value may be cast to; `regclass` and its kin look into the catalogue."""
