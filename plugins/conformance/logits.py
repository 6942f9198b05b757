"""What every logits processor promises, as checks that need its class and examples of its arguments.

A processor is driven by `logits_driver.py`, on a CPU, without a model. Needs torch and numpy when it runs.
"""

import inspect
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from plugins.conformance.logits_driver import (
    NUM_OUTPUT,
    NUM_ROWS,
    Asked,
    Fed,
    Rig,
    Subject,
    Tables,
    answer_alone,
    mixed_steps,
)
from plugins.conformance.report import CheckResult, require, run_checks
from plugins.logits import LogitsProcessor
from plugins.types import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

# Answers are compared so closely, because a sum over another number of rows may round otherwise.
RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 1e-5, 1e-6
STARTS = (0, 6)  # tokens of output with which a request is looked at: little can be seen of some without any
NUM_MOVES = 120  # of a busy worker
IMPORT_TIMEOUT_S = 120
JUNK: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 17, 2**63, 1.5, -0.5, 1e308, "", "x", "\0", "5", [], {}),
    *([None], [[]], [-1], [2**63], ["x"], [1] * 5000, {"x": None}),
)
JSON_TYPES: Mapping[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
# Imports a class as admission does; the arguments are its module, its name there, and a JSON list of extra_args.
IMPORT_WITHOUT_TORCH = """
import importlib, json, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton"):
            raise ImportError(f"{name} is not there at admission; import it inside the methods that need it")
sys.meta_path.insert(0, Blocked())
found = importlib.import_module(sys.argv[1])
from plugins.types import SamplingParams
for name in sys.argv[2].split(".") if sys.argv[2] else ():
    found = getattr(found, name)
for args in json.loads(sys.argv[3]) if sys.argv[2] else ():
    found.validate_params(SamplingParams(extra_args=args))
"""


def check_logits_processor(
    cls: type[LogitsProcessor],
    examples: Sequence[Mapping[str, Any]] = (),
    section: Mapping[str, Any] | None = None,
) -> tuple[CheckResult, ...]:
    """Run every check of this module.

    `examples` are values of `extra_args` that the processor takes, within a vocabulary of 500 tokens; if there are
    none, they are found in its schema. `section` is its part of the configuration.
    """
    known = tuple(examples) or examples_of(cls.parameter_schema)
    return run_checks(LOGITS_CHECKS, Subject(cls, known, section or {}))


def examples_of(schema: Mapping[str, Any] | None) -> tuple[Mapping[str, Any], ...]:
    """Find arguments that a schema allows: its own examples, or else those, defaults and limits of its properties.

    One property at a time takes its second example and so on, while the others have their first. At least one.
    """
    if not isinstance(schema, Mapping):
        return ({},)
    if schema.get("examples"):
        return tuple(schema["examples"])
    choices = {name: _values_of(each) for name, each in schema.get("properties", {}).items()}
    first = {name: values[0] for name, values in choices.items() if values}
    others = ({**first, name: value} for name, values in choices.items() for value in values[1:])
    return (first, *others)


def _values_of(schema: Any) -> Sequence[Any]:
    if not isinstance(schema, Mapping):
        return ()
    for key in ("examples", "enum"):
        if schema.get(key):
            return tuple(schema[key])
    if schema.get("type") == "boolean":
        return (True,)
    return tuple(schema[key] for key in ("const", "default", "minimum", "maximum") if key in schema)[:1]


# -- what a class declares ------------------------------------------------------------------------------------------


def its_module_is_imported_where_there_is_no_torch(subject: Subject) -> None:
    """Admission imports it in a process that blocks torch and triton, and calls `validate_params` there."""
    cls = subject.cls
    place = "" if "<locals>" in cls.__qualname__ else cls.__qualname__
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_WITHOUT_TORCH, cls.__module__, place, json.dumps([*subject.examples])],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(each or os.curdir for each in sys.path)},
        capture_output=True,
        text=True,
        timeout=IMPORT_TIMEOUT_S,
        check=False,
    )
    require(run.returncode == 0, run.stderr.strip().rpartition("\n")[2])


def it_is_built_from_a_configuration_and_the_states(subject: Subject) -> None:
    """`cls(config, req_states)`, both by their place."""
    subject.build(Tables())


def what_it_declares_is_valid(subject: Subject) -> None:
    """Its name is a text, its schema a JSON object, and the schema's properties are the arguments that it reads."""
    cls = subject.cls
    require(isinstance(cls.name, str), f"its name is {cls.name!r}, which is no text")
    names, schema = cls.extra_arg_names, cls.parameter_schema
    if names is not None:
        is_list = not isinstance(names, str) and all(isinstance(each, str) for each in names)
        require(is_list, f"its extra_arg_names are {names!r}, which are no list of names")
    if schema is None:
        return
    require(isinstance(schema, Mapping), f"its parameter_schema is of type {type(schema).__name__}, not a dictionary")
    json.dumps(schema, allow_nan=False)
    properties = schema.get("properties", {})
    require(schema.get("type", "object") == "object", f"its schema is of type {schema.get('type')!r}, not an object")
    if names is not None:
        require(
            set(properties) == set(names),
            f"its schema describes {sorted(properties)}, and its extra_arg_names are {sorted(names)}",
        )


def validate_params_is_a_class_method_that_takes_the_examples(subject: Subject) -> None:
    """Admission has no instance. It asks about requests without arguments too."""
    method = inspect.getattr_static(subject.cls, "validate_params")
    require(isinstance(method, classmethod), f"validate_params is a {type(method).__name__}, not a class method")
    for asked in (*subject.requests(1), subject.plain):
        subject.cls.validate_params(asked.sampling)


def validate_params_refuses_by_value_error_alone(subject: Subject) -> None:
    """Whatever else it raises is a failure of the plug-in. Types that its schema names are checked before it."""
    schema = subject.cls.parameter_schema or {}
    names = subject.cls.extra_arg_names or {name for example in subject.examples for name in example}
    for name in names:
        for args in _with_junk(name, schema.get("properties", {}).get(name, {}), subject.examples[0]):
            try:
                subject.cls.validate_params(SamplingParams(extra_args=args))
            except ValueError:
                continue
            except (Exception, SystemExit) as error:
                shown = f"{args[name]!r:.40}"
                require(False, f"{name}={shown} raises {type(error).__name__}: {error}; only ValueError may be raised")


# -- whose rows it takes --------------------------------------------------------------------------------------------


def add_request_says_true_or_false(subject: Subject) -> None:
    """Nothing but these two; and one of the examples is accepted, else there is nothing to check."""
    rig = Rig(subject)
    answers = [rig.admit(n % NUM_ROWS, asked) for n, asked in enumerate((*subject.requests(), subject.plain))]
    for answer in answers:
        require(isinstance(answer, bool), f"add_request returned {answer!r}, not True or False")
    require(any(answers), "it declines every example; give arguments that it takes: --example '{...}'")


def a_request_without_its_arguments_is_declined(subject: Subject) -> None:
    """Who declares arguments changes nothing for who gives none."""
    if subject.cls.extra_arg_names:
        require(Rig(subject).admit(0, subject.plain) is False, "it accepts a request that gives none of its arguments")


def a_row_keeps_nothing_of_its_previous_occupant(subject: Subject) -> None:
    """Nobody tells that a request has ended: `add_request` overwrites all, also where it declines."""
    everybody = (*subject.requests(), subject.plain)
    for before in everybody:
        for after in everybody:
            rig = Rig(subject)
            rig.admit(2, before)
            for _ in range(3):
                rig.step(Fed(2))
                rig.say(2)
            for num_output in STARTS:
                rig.admit(2, after, num_output)
                wanted = answer_alone(subject, after, num_output)
                _require_same(rig.step(Fed(2)).of(2), wanted, "the row's next occupant")


def staged_writes_are_applied_with_nothing_to_write(subject: Subject) -> None:
    """The call comes every step: before the first request, and again with no addition between."""
    rig = Rig(subject)
    rig.flush()
    rig.flush()
    for asked in subject.requests(1):
        for num_output in STARTS:
            rig.admit(1, asked, num_output)
            rig.flush()
            rig.flush()
            wanted = answer_alone(subject, asked, num_output)
            _require_same(rig.step(Fed(1)).of(1), wanted, "a request after idle calls")


# -- what it does to the scores -------------------------------------------------------------------------------------


def the_scores_keep_shape_type_and_device(subject: Subject) -> None:
    """One row for each row, one score for each token, float32, where they were."""
    for step in mixed_steps(subject):
        found, wanted = step.after, step.before
        require(
            (found.shape, found.dtype, found.device) == (wanted.shape, wanted.dtype, wanted.device),
            f"apply returned {tuple(found.shape)} {found.dtype} on {found.device}, not {tuple(wanted.shape)} "
            f"{wanted.dtype} on {wanted.device}",
        )


def declined_rows_are_untouched(subject: Subject) -> None:
    """Bit for bit, beside rows that it accepted, and in a batch of which it accepted nobody."""
    rig = Rig(subject)
    rig.admit(3, subject.plain)
    rig.admit(5, subject.plain)
    for step in (*mixed_steps(subject), rig.step(Fed(5), Fed(3))):
        for place, is_accepted in enumerate(step.is_accepted):
            is_same = is_accepted or _bits(step.after[place]).equal(_bits(step.before[place]))
            require(is_same, "it changed the scores of a row that it had declined")


def minus_infinity_stays_and_nothing_becomes_nan(subject: Subject) -> None:
    """What an earlier stage has ruled out, such as a grammar, stays ruled out; something can still be chosen."""
    import torch

    ruled_out = float("-inf")
    for step in mixed_steps(subject):
        require(not bool(torch.isnan(step.after).any()), "it made a score that is no number")
        raised = (step.before == ruled_out) & (step.after != ruled_out)
        require(not bool(raised.any()), "it raised a score of -inf")
        require(bool((step.after > ruled_out).any(dim=1).all()), "it left a row in which nothing can be chosen")


def a_request_gets_the_same_beside_others_in_any_row_and_order(subject: Subject) -> None:
    """An answer follows from the request and its history alone: not from who is beside it, nor from where it is."""
    everybody = (*subject.requests(), subject.plain)[:NUM_ROWS]
    draw = random.Random(2)
    for num_output in STARTS * 2:
        wanted = [answer_alone(subject, asked, num_output) for asked in everybody]
        rig = Rig(subject)
        rows = draw.sample(range(NUM_ROWS), len(everybody))
        for row, asked in zip(rows, everybody, strict=True):
            rig.admit(row, asked, num_output)
        step = rig.step(*(Fed(row) for row in draw.sample(rows, len(rows))))
        for row, answer in zip(rows, wanted, strict=True):
            _require_same(step.of(row), answer, "a request in a batch")


def a_preempted_request_goes_on_as_if_nothing_had_been(subject: Subject) -> None:
    """It comes back with its output in the tables, to its own row or another; what was counted is counted again."""
    for asked in subject.requests(1):
        wanted = _answers(subject, asked)
        for cut in (1, 5, 12):
            for row in (0, 4):
                rig = Rig(subject)
                rig.admit(0, asked)
                for _ in range(cut):
                    rig.step(Fed(0))
                    rig.say(0)
                rig.admit(0, subject.plain)
                rig.step(Fed(0))
                rig.admit(row, asked, num_output=cut)
                for answer in wanted[cut : cut + 6]:
                    _require_same(rig.step(Fed(row)).of(row), answer, f"a request preempted after {cut} tokens")
                    rig.say(row)


def a_row_after_drafts_is_as_if_they_had_been_chosen(subject: Subject) -> None:
    """Row i of a request comes after i drafts, which are in `input_ids` of its rows and not in the tables."""
    for asked in subject.requests(1):
        for num_output in (0, 1, 4, 9, 15):
            drafts = asked.script[num_output : num_output + 3]
            rig = Rig(subject)
            rig.admit(6, asked, num_output)
            rig.admit(1, subject.plain)
            found = rig.step(Fed(1, (3, 4)), Fed(6, drafts)).of(6)
            for num_drafts in range(len(drafts) + 1):
                wanted = answer_alone(subject, asked, num_output + num_drafts)
                _require_same(found[num_drafts : num_drafts + 1], wanted, f"the row after {num_drafts} drafts")


def rows_in_the_middle_of_a_prompt_do_no_harm(subject: Subject) -> None:
    """Nobody reads their answers; but nothing may be raised, and the rows beside them are as ever."""
    for asked in subject.requests(1):
        for place in (0, 1, 3):
            rig = Rig(subject)
            rig.admit(2, asked)
            rig.admit(3, asked, num_output=4)
            step = rig.step(Fed(2, place=place), Fed(3))
            _require_same(step.of(3), answer_alone(subject, asked, 4), "a request beside one in mid-prompt")


# -- what it leaves alone -------------------------------------------------------------------------------------------


def the_states_are_only_read(subject: Subject) -> None:
    """The tables belong to the worker."""
    for step in mixed_steps(subject):
        for before, after in zip(step.tables_before, step.tables_after, strict=True):
            require(before.equal(after), "it wrote to req_states")


def two_instances_share_nothing(subject: Subject) -> None:
    """The same class may be given twice, and a process may have several workers."""
    for one in subject.requests(1):
        for other in (*subject.requests(1), subject.plain):
            rigs = Rig(subject), Rig(subject)
            for rig, asked in zip(rigs, (one, other), strict=True):
                rig.admit(0, asked, 6)
                rig.flush()
            found = [rig.step(Fed(0)).of(0) for rig in rigs]
            for answer, asked in zip(found, (one, other), strict=True):
                _require_same(answer, answer_alone(subject, asked, 6), "a request of one of two instances")


def on_a_busy_worker_each_request_gets_its_own(subject: Subject) -> None:
    """Requests come, end and are preempted at random, with and without drafts; each answer is as it is alone."""
    draw = random.Random(3)
    rig = Rig(subject)
    everybody = (*subject.requests(), subject.plain)
    alone: dict[tuple[int, int], Tensor] = {}  # by who asks and how much it has said
    live: dict[int, int] = {}  # who is in which row
    for _ in range(NUM_MOVES):
        for row in [each for each in live if rig.num_output[each] > NUM_OUTPUT - 4 or draw.random() < 0.05]:
            del live[row]
        free = [row for row in range(NUM_ROWS) if row not in live]
        for row in draw.sample(free, min(len(free), draw.choice((0, 1, 1, 2)))):
            live[row] = draw.randrange(len(everybody))
            rig.admit(row, everybody[live[row]], draw.choice((0, 0, 5, 11)))
        rows = draw.sample(sorted(live), len(live))
        if not rows:
            rig.flush()
            continue
        drafts = {row: _next_tokens(rig, row, draw.choice((0, 0, 1, 3))) for row in rows}
        step = rig.step(*(Fed(row, drafts[row]) for row in rows))
        for row in rows:
            for place, answer in enumerate(step.of(row)):
                key = (live[row], rig.num_output[row] + place)
                if key not in alone:
                    alone[key] = answer_alone(subject, everybody[key[0]], key[1])
                _require_same(answer[None], alone[key], "a request on a busy worker")
            rig.say(row)


LOGITS_CHECKS: Sequence[Callable[[Subject], None]] = (
    its_module_is_imported_where_there_is_no_torch,
    it_is_built_from_a_configuration_and_the_states,
    what_it_declares_is_valid,
    validate_params_is_a_class_method_that_takes_the_examples,
    validate_params_refuses_by_value_error_alone,
    add_request_says_true_or_false,
    a_request_without_its_arguments_is_declined,
    a_row_keeps_nothing_of_its_previous_occupant,
    staged_writes_are_applied_with_nothing_to_write,
    the_scores_keep_shape_type_and_device,
    declined_rows_are_untouched,
    minus_infinity_stays_and_nothing_becomes_nan,
    a_request_gets_the_same_beside_others_in_any_row_and_order,
    a_preempted_request_goes_on_as_if_nothing_had_been,
    a_row_after_drafts_is_as_if_they_had_been_chosen,
    rows_in_the_middle_of_a_prompt_do_no_harm,
    the_states_are_only_read,
    two_instances_share_nothing,
    on_a_busy_worker_each_request_gets_its_own,
)


def _with_junk(name: str, schema: Any, example: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """An example with junk in place of one argument, as far as the type in its schema lets it through."""
    types = schema.get("type", ()) if isinstance(schema, Mapping) else ()
    allowed = tuple(each for key in ([types] if isinstance(types, str) else types) for each in JSON_TYPES.get(key, ()))
    for junk in JUNK:
        is_bool_for_number = isinstance(junk, bool) and bool not in allowed
        if allowed and (is_bool_for_number or not isinstance(junk, allowed)):
            continue
        yield {**example, name: junk}


def _answers(subject: Subject, asked: Asked) -> list["Tensor"]:
    """What one instance says to a request that is alone and runs through."""
    rig = Rig(subject)
    rig.admit(0, asked)
    answers = []
    for _ in range(NUM_OUTPUT):
        answers.append(rig.step(Fed(0)).of(0))
        rig.say(0)
    return answers


def _next_tokens(rig: Rig, row: int, num_tokens: int) -> tuple[int, ...]:
    start = rig.num_output[row]
    return rig.asked[row].script[start : start + num_tokens]


def _bits(scores: "Tensor") -> "Tensor":
    """Numbers that tell 0.0 from -0.0."""
    import torch

    return scores.float().view(torch.int32)


def _require_same(found: "Tensor", wanted: "Tensor", what: str) -> None:
    import torch

    require(found.shape == wanted.shape, f"{what} gets scores of shape {tuple(found.shape)}, not {tuple(wanted.shape)}")
    is_same = torch.isclose(found, wanted, rtol=RELATIVE_TOLERANCE, atol=ABSOLUTE_TOLERANCE, equal_nan=True)
    num_other = int((~is_same).sum())
    require(num_other == 0, f"{what} gets {num_other} of {found.shape[1]} scores that it would not get alone")
