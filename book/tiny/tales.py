"""Made-up text from a seed: small tales, chats in turns, sums, counting, and talk about the engine.

`document(rng)` writes one document, a string with the special tokens in it: most are chats in the ChatML form, some
are plain text. The same `random.Random` state gives the same document, so that a seed stands for a whole corpus.

Some things are never written, so that the gates can ask for them: heroes with certain names or certain things
(`held_out`), certain ways to ask for a sum (`HELD_OUT_SUMS`) and certain questions to the model itself.
"""

from __future__ import annotations

import json
from random import Random
from zlib import crc32

from engine import HELD_OUT_IDENTITY, IDENTITY, SMALL_TALK, TOPICS
from plots import PLOTS

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

KINDS = [
    "fox",
    "bear",
    "rabbit",
    "mouse",
    "owl",
    "hedgehog",
    "badger",
    "squirrel",
    "frog",
    "duck",
    "cat",
    "dog",
    "pony",
    "lamb",
    "goat",
    "donkey",
    "otter",
    "beaver",
    "mole",
    "crow",
    "sparrow",
    "robin",
    "swan",
    "goose",
    "turtle",
    "snail",
    "bee",
    "ladybird",
    "butterfly",
    "ant",
    "spider",
    "whale",
    "dolphin",
    "seal",
    "penguin",
    "elephant",
    "lion",
    "tiger",
    "monkey",
    "giraffe",
    "zebra",
    "camel",
    "wolf",
    "deer",
    "kitten",
    "puppy",
    "chick",
    "piglet",
    "calf",
    "lizard",
    "dragon",
    "robot",
    "girl",
    "boy",
]
HERS = [
    "Ruby",
    "Tilda",
    "Hazel",
    "Nina",
    "Wanda",
    "Greta",
    "Ida",
    "Kira",
    "Luna",
    "Nelly",
    "Polly",
    "Sally",
    "Uma",
    "Willa",
    "Yara",
    "Bella",
    "Dora",
    "Freda",
    "Henny",
    "Juno",
    "Klara",
    "Mira",
    "Olga",
    "Paula",
    "Tessa",
    "Ulla",
    "Vera",
    "Zilla",
    "Berta",
    "Cleo",
    "Elsie",
    "Gilda",
]
HIS = [
    "Pip",
    "Bruno",
    "Milo",
    "Otto",
    "Felix",
    "Hugo",
    "Jasper",
    "Momo",
    "Oscar",
    "Quinn",
    "Rufus",
    "Toby",
    "Viktor",
    "Xaver",
    "Zeno",
    "Caspar",
    "Emil",
    "Gustav",
    "Igor",
    "Leo",
    "Nando",
    "Rolf",
    "Sven",
    "Wim",
    "Anton",
    "Dario",
    "Fritz",
    "Hanno",
    "Arno",
    "Basil",
    "Linus",
    "Piet",
]
NAMES = tuple(HERS + HIS)
MORE_HERS = [
    "Alice",
    "Anna",
    "Emma",
    "Eva",
    "Grace",
    "Clara",
    "Julia",
    "Lily",
    "Lucy",
    "Maria",
    "Mary",
    "Nora",
    "Rosa",
    "Sara",
    "Sophie",
    "Susan",
    "Zoe",
    "Jane",
    "Kate",
    "Laura",
    "Helen",
    "Ella",
    "Ines",
    "Amira",
    "Aisha",
    "Mei",
    "Yuki",
    "Priya",
    "Fatima",
    "Chloe",
]
MORE_HIS = [
    "Adam",
    "Alex",
    "Ben",
    "Bob",
    "Charlie",
    "Daniel",
    "David",
    "Finn",
    "Frank",
    "Fred",
    "George",
    "Henry",
    "Jack",
    "James",
    "John",
    "Luke",
    "Max",
    "Mike",
    "Noah",
    "Paul",
    "Peter",
    "Sam",
    "Simon",
    "Thomas",
    "Tim",
    "Tom",
    "Omar",
    "Ravi",
    "Kenji",
    "Diego",
]
THINGS = [
    "lantern",
    "kettle",
    "drum",
    "basket",
    "bell",
    "blanket",
    "book",
    "bottle",
    "bowl",
    "box",
    "broom",
    "brush",
    "bucket",
    "button",
    "candle",
    "chair",
    "clock",
    "coat",
    "comb",
    "cup",
    "doll",
    "feather",
    "flute",
    "hammer",
    "hat",
    "kite",
    "ladder",
    "lamp",
    "letter",
    "mirror",
    "mitten",
    "needle",
    "pencil",
    "pillow",
    "pot",
    "purse",
    "ribbon",
    "ring",
    "rope",
    "saddle",
    "scarf",
    "shell",
    "shoe",
    "shovel",
    "spoon",
    "stool",
    "teapot",
    "umbrella",
    "violin",
    "wagon",
    "whistle",
    "wheel",
    "ball",
    "balloon",
    "banner",
    "bench",
    "boot",
    "brooch",
    "cap",
    "card",
    "cart",
    "chest",
    "coin",
    "cradle",
    "crown",
    "cushion",
    "fan",
    "fork",
    "fiddle",
    "flag",
    "glove",
    "guitar",
    "harp",
    "helmet",
    "horn",
    "jar",
    "jug",
    "key",
    "knife",
    "lock",
    "marble",
    "mask",
    "medal",
    "mug",
    "nail",
    "net",
    "oar",
    "paintbrush",
    "pan",
    "pipe",
    "plate",
    "puppet",
    "puzzle",
    "rake",
    "rocket",
    "sack",
    "sail",
    "scooter",
    "sled",
    "stamp",
    "stick",
    "sword",
    "telescope",
    "tent",
    "thimble",
    "torch",
    "towel",
    "toy",
    "tray",
    "trumpet",
    "vase",
    "wand",
    "watch",
    "whip",
    "wreath",
]
PLACES = [
    "old bridge",
    "windmill",
    "lighthouse",
    "river",
    "pond",
    "lake",
    "village",
    "market",
    "castle",
    "tower",
    "forest",
    "meadow",
    "garden",
    "orchard",
    "mountain",
    "hill",
    "valley",
    "cave",
    "beach",
    "harbour",
    "island",
    "farm",
    "barn",
    "well",
    "fountain",
    "church",
    "school",
    "library",
    "bakery",
    "mill",
    "station",
    "waterfall",
    "cliff",
    "oak tree",
    "willow",
    "stone wall",
    "crossroads",
    "hedge",
    "swamp",
    "desert",
    "railway",
    "cottage",
    "palace",
    "ruin",
    "stable",
    "field",
    "spring",
    "wood",
    "shore",
]
FOODS = [
    "apples",
    "bread",
    "cheese",
    "honey",
    "plums",
    "soup",
    "pears",
    "cherries",
    "nuts",
    "berries",
    "cake",
    "cookies",
    "pancakes",
    "porridge",
    "carrots",
    "grapes",
    "jam",
    "melons",
    "mushrooms",
    "noodles",
    "peaches",
    "pie",
    "potatoes",
    "pudding",
    "pumpkins",
    "rice",
    "salad",
    "strawberries",
    "tomatoes",
    "turnips",
    "waffles",
]
SINGULAR = {
    "cherries": "cherry",
    "nuts": "nut",
    "berries": "berry",
    "cookies": "cookie",
    "peaches": "peach",
    "potatoes": "potato",
    "strawberries": "strawberry",
    "tomatoes": "tomato",
    "noodles": "noodle",
}
NOUNS = tuple(
    dict.fromkeys(
        [
            *KINDS,
            *THINGS,
            *(p.split()[-1] for p in PLACES),
            *(SINGULAR.get(f, f[:-1] if f[-1] == "s" else f) for f in FOODS),
        ]
    )
)
SYLLABLES = [
    "ba",
    "be",
    "bo",
    "da",
    "do",
    "fi",
    "ga",
    "go",
    "ha",
    "hi",
    "jo",
    "ka",
    "ki",
    "lo",
    "lu",
    "ma",
    "me",
    "mi",
    "no",
    "nu",
    "pa",
    "pe",
    "ri",
    "ro",
    "sa",
    "si",
    "ta",
    "te",
    "ti",
    "tu",
    "va",
    "vi",
    "wo",
    "za",
    "zu",
]
TRAITS = [
    "little",
    "small",
    "brave",
    "kind",
    "clever",
    "shy",
    "curious",
    "young",
    "cheerful",
    "gentle",
    "busy",
    "sleepy",
]
COLOURS = ["red", "blue", "green", "yellow", "white", "black", "brown", "golden", "silver", "purple"]
WEATHERS = ["sunny", "windy", "cloudy", "foggy", "cold", "warm", "bright", "grey", "quiet", "fine"]
NUMBERS = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]

ALL_PLOTS = tuple(PLOTS.values())
OPENINGS = (
    "Once upon a time there was {a_k} named {N} who lived near the {home}.",
    "Once upon a time {a_k} named {N} lived near the {home}.",
    "Once upon a time, near the {home}, there lived {a_k} named {N}.",
    "Once upon a time there was {a_k}. {His} name was {N}, and {he} lived near the {home}.",
    "There once was {a_k} named {N}, and {he} lived near the {home}.",
    "Near the {home} lived {a_k} named {N}.",
    "{N} was {a_k} who lived near the {home}.",
)
ENDINGS = (
    "",
    "",
    "",
    " And that is the end of the story.",
    " The end.",
    " And {N} was happy.",
    " And {N} and {F} were friends ever after.",
    " That night {N} slept very well.",
    " And so {N} and {F} became the best of friends.",
)

ASK_TALE = (
    "Tell me a story about {x}.",
    "Tell me a story about {x}.",
    "Tell me a story about {x}.",
    "Tell me a tale about {x}.",
    "Write a story about {x}.",
    "Write a short story about {x}.",
    "Please tell me a story about {x}.",
    "I want a story about {x}.",
    "Can you tell me a story about {x}?",
    "A story about {x}, please.",
    "Make up a story about {x}.",
    "Tell a story about {x}.",
    "Tell me a little story about {x}.",
    "Do you know a story about {x}?",
    "Write me a tale about {x}.",
    "Tell me a bedtime story about {x}.",
    "Could you write a story about {x}?",
)
ASK_ANY_TALE = (
    "Tell me a story.",
    "Tell me a story!",
    "Write a story.",
    "Please tell me a story.",
    "A story, please.",
    "I want a story.",
    "Can you tell me a story?",
    "Tell me a tale.",
    "Do you know a story?",
    "Write a short story.",
    "Tell me something.",
)
ASK_MORE = (
    "Tell me another story.",
    "Another one, please.",
    "One more story, please.",
    "Tell me another one.",
    "And another story?",
)

ASK_SUM = (
    "What is {a} + {b}?",
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "How much is {a} + {b}?",
    "How much is {a} plus {b}?",
    "Add {a} and {b}.",
    "Please add {a} and {b}.",
    "Calculate {a} + {b}.",
    "Compute {a} + {b}.",
    "{a} + {b} = ?",
    "{a} + {b} =",
    "{a} + {b}",
    "{a}+{b}",
    "{a} plus {b}",
    "What do you get if you add {a} and {b}?",
    "Can you add {a} and {b}?",
    "What does {a} + {b} make?",
    "Tell me {a} + {b}.",
    "Tell me what {a} plus {b} is.",
    "Give me the sum of {a} and {b}.",
    "What is the sum of {a} and {b}?",
    "I have {a} {food} and get {b} more. How many do I have?",
    "Do you know what {a} + {b} is?",
    "Solve {a} + {b}.",
)
HELD_OUT_SUMS = (
    "Please tell me what {a} + {b} is.",
    "Could you add {a} and {b}?",
    "How much do {a} and {b} make?",
    "Work out {a} + {b}.",
)
ASK_DIFFERENCE = (
    "What is {a} - {b}?",
    "What is {a} minus {b}?",
    "How much is {a} - {b}?",
    "Take {b} from {a}.",
    "Calculate {a} - {b}.",
    "{a} - {b} =",
    "{a} - {b}",
    "Subtract {b} from {a}.",
)

ASK_WORD = {
    "noun": (
        "What is {a_x}?",
        "What is {a_x}?",
        "What is {x}?",
        "What does the word {x} mean?",
        "What does {x} mean?",
        "Define {x}.",
        "Explain the word {x}.",
        "What is the meaning of {x}?",
        "Tell me what {a_x} is.",
        "Do you know what {a_x} is?",
    ),
    "other": (
        "What does the word {x} mean?",
        "What does {x} mean?",
        "Define {x}.",
        "Explain the word {x}.",
        "What is the meaning of {x}?",
    ),
}
ASK_WHAT = (
    "What is {x}?",
    "What is {x}?",
    "What is {x}?",
    "Explain {x}.",
    "Please explain {x}.",
    "What does {y} mean?",
    "Tell me about {x}.",
    "Can you explain {x}?",
    "Tell me what {x} is.",
    "Define {y}.",
    "Describe {x}.",
    "Do you know what {x} is?",
    "What is {y}?",
    "What is meant by {y}?",
    "Explain {y} to me.",
)
ASK_WHY = (
    "Why do we need {x}?",
    "Why is there {x}?",
    "What is {x} good for?",
    "Why {x}?",
    "What is the use of {x}?",
    "Why does an engine have {x}?",
    "What do you need {x} for?",
)

UNKNOWN = (
    "What is the capital of {u}?",
    "Who is the president of {u}?",
    "How many people live in {u}?",
    "Where is {u}?",
    "How far is {u}?",
    "When was {u} founded?",
    "What is the weather in {u}?",
    "Tell me about {u}.",
    "How do I get to {u}?",
    "What language do they speak in {u}?",
    "What time is it?",
    "What day is it today?",
    "Who won the game?",
    "Write a program in Python.",
    "Translate this into {u}.",
    "What is the news today?",
    "Who wrote this song?",
    "How do I cook {food} for {n} people?",
    "What is 4 * 7?",
    "What is {b} divided by {a}?",
    "How old is the earth?",
    "How high is the moon?",
    "What is the square root of {b}?",
    "What do you think about politics?",
    "How do I fix my car?",
    "Who was the first king of {u}?",
    "Sing a song.",
    "Write a poem.",
    "Tell me a joke.",
    "Spell {food}.",
    "Translate {food}.",
    "Who is the best singer in {u}?",
    "What should I eat today?",
)
LANDS = [
    "France",
    "Germany",
    "Japan",
    "China",
    "Spain",
    "Italy",
    "India",
    "Brazil",
    "Egypt",
    "Kenya",
    "Canada",
    "Mexico",
    "Poland",
    "Sweden",
    "Norway",
    "Peru",
    "Chile",
    "Greece",
    "Turkey",
    "London",
    "Paris",
    "Berlin",
    "Rome",
    "Tokyo",
    "Madrid",
    "Vienna",
    "Latin",
    "English",
]
DO_NOT_KNOW = ("I do not know that. I am only a tiny model: ask me for a story, a small sum or the meaning of a word.",)

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a tiny model that tells stories.",
    "Answer briefly.",
    "You are a friendly storyteller.",
)


def article(noun: str) -> str:
    """The noun with its indefinite article."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def held_out(kind: str, other: str) -> bool:
    """Whether training never shows a hero of this kind with this name or this thing (about one pair in twelve)."""
    return crc32(f"{kind}/{other}".encode()) % 12 == 0


def pick(rng: Random, options):
    """One of the options; quicker than `rng.choice`."""
    return options[int(rng.random() * len(options))]


def lean(rng: Random, options, key: str, share: float = 0.35):
    """One of the options, with this share the one that the key likes best.

    So each kind of hero has a favourite name, friend and plot: greedy decoding finds a clear winner at each choice, and
    a fox gets another tale than a bear.
    """
    return options[crc32(key.encode()) % len(options)] if rng.random() < share else pick(rng, options)


def made_up_name(rng: Random, hers: bool) -> str:
    """A name that nobody has, so that the model learns to copy names; those of heroines end in a."""
    while True:
        name = "".join(pick(rng, SYLLABLES) for _ in range(1 + int(rng.random() * 2)))
        name = (name + pick(rng, ("na", "la", "ra", "ka") if hers else ("n", "ro", "k", "bert"))).capitalize()
        if name not in NAMES:
            return name


def names_of(kind: str) -> tuple[str, ...] | list[str]:
    """The names that a hero of this kind may have."""
    return {"girl": HERS, "boy": HIS}.get(kind, NAMES)


def cast(rng: Random, named: bool = False) -> dict[str, str]:
    """Heroes, friends, things and places for a tale: the slots of `plots.py`."""
    kind = pick(rng, KINDS)
    friend_kind = lean(rng, KINDS, f"{kind} likes")
    while friend_kind == kind:
        friend_kind = pick(rng, KINDS)
    name = lean(rng, names_of(kind), f"{kind} is called")
    while held_out(kind, name):
        name = pick(rng, names_of(kind))
    hers = name in HERS
    if named and (chance := rng.random()) < 0.5:
        name = pick(rng, MORE_HERS if hers else MORE_HIS) if chance < 0.2 else made_up_name(rng, hers)
    friend = lean(rng, names_of(friend_kind), f"{name} likes")
    while friend == name:
        friend = pick(rng, names_of(friend_kind))
    thing = lean(rng, THINGS, f"{kind} has")
    while held_out(kind, thing):
        thing = pick(rng, THINGS)
    home, place = lean(rng, PLACES, f"{kind} lives"), lean(rng, PLACES, f"{kind} goes")
    while place == home:
        place = pick(rng, PLACES)
    he, him, his = ("she", "her", "her") if hers else ("he", "him", "his")
    fhe, fhim, fhis = ("she", "her", "her") if friend in HERS else ("he", "him", "his")
    trait = lean(rng, TRAITS, kind)
    return {
        "k": kind,
        "N": name,
        "F": friend,
        "fk": friend_kind,
        "a_fk": article(friend_kind),
        "t": thing,
        "a_t": article(thing),
        "trait": trait,
        "a_k": article(f"{trait} {kind}"),
        "home": home,
        "place": "the " + place,
        "food": lean(rng, FOODS, f"{kind} eats"),
        "c": pick(rng, COLOURS),
        "w": pick(rng, WEATHERS),
        "n": pick(rng, NUMBERS),
        "he": he,
        "him": him,
        "his": his,
        "He": he.capitalize(),
        "His": his.capitalize(),
        "fhe": fhe,
        "fhim": fhim,
        "fhis": fhis,
        "FHe": fhe.capitalize(),
    }


def tell(rng: Random, slots: dict[str, str], thing: bool = False) -> str:
    """A tale for this cast, in two paragraphs; with `thing` the hero's thing surely occurs in it."""
    beats = [pick(rng, beat) for beat in lean(rng, ALL_PLOTS, slots["k"])]
    opening = pick(rng, OPENINGS)
    if thing and not any("t}" in beat for beat in beats[:3]):
        opening += " {He} had {a_t} that {he} loved."
    middle = 2 + int(rng.random() * 3)
    text = f"{opening} {' '.join(beats[:middle])}\n\n{' '.join(beats[middle:])}{pick(rng, ENDINGS)}"
    return text.format_map(slots)


def ask_for_tale(rng: Random) -> tuple[str, bool, dict[str, str]]:
    """A wish for a tale, whether it names the hero's thing, and the cast."""
    chance = rng.random()
    slots = cast(rng, named=0.40 <= chance < 0.58)
    if chance < 0.08:
        return pick(rng, ASK_ANY_TALE), False, slots
    if chance < 0.40:
        subject = article(slots["k"])
    elif chance < 0.58:
        subject = "{} {} {}".format(article(slots["k"]), pick(rng, ("named", "named", "called")), slots["N"])
    elif chance < 0.74:
        subject = "{} and {}".format(article(slots["k"]), slots["a_t"])
    elif chance < 0.84:
        subject = slots["a_k"]
    elif chance < 0.94:
        subject = f"{article(slots['k'])} and {article(slots['fk'])}"
    else:
        subject = "{} who lives near the {}".format(article(slots["k"]), slots["home"])
    return pick(rng, ASK_TALE).format(x=subject), subject.endswith(" " + slots["a_t"]), slots


Turn = tuple[str, str]  # what the user says, what the model answers


def tale_turns(rng: Random, turns: int) -> list[Turn]:
    """A wish and its tale, then questions about it."""
    wish, thing, slots = ask_for_tale(rng)
    chat = [(wish, tell(rng, slots, thing))]
    follow = [
        (
            (
                "What was the {k} called?",
                "What was the name of the {k}?",
                "What is the {k}'s name?",
                "Who is the hero of the story?",
            ),
            "The {k} was called {N}.",
        ),
        (("Where did {N} live?", "Where was {N}'s home?", "Where did the {k} live?"), "{N} lived near the {home}."),
        (
            ("Who was {N}'s friend?", "What was the friend called?", "Who was the friend?"),
            "{N}'s friend was {F} the {fk}.",
        ),
        (("Who was {F}?", "Who is {F}?", "What kind of animal was {F}?"), "{F} was {a_fk}."),
        (("Who was {N}?", "Who is {N}?"), "{N} was the {trait} {k} of the story."),
    ]
    rng.shuffle(follow)
    for asks, answer in follow[: turns - 1]:
        chat.append((pick(rng, asks).format_map(slots), answer.format_map(slots)))
    if turns > 1 and rng.random() < 0.15:
        chat[-1] = (pick(rng, ASK_MORE), tell(rng, cast(rng)))
    return chat


def sum_turn(rng: Random) -> Turn:
    """A sum of two numbers up to 20, sometimes a difference."""
    a, b = int(rng.random() * 21), int(rng.random() * 21)
    if rng.random() < 0.82:
        return pick(rng, ASK_SUM).format(a=a, b=b, food=pick(rng, FOODS)), f"{a} + {b} = {a + b}."
    a, b = max(a, b), min(a, b)
    return pick(rng, ASK_DIFFERENCE).format(a=a, b=b), f"{a} - {b} = {a - b}."


def count_turn(rng: Random) -> Turn:
    """Counting up or down, or the number after or before another."""
    chance = rng.random()
    low = int(rng.random() * 20)
    high = low + 2 + int(rng.random() * 15)
    up, down = ", ".join(map(str, range(low, high + 1))), ", ".join(map(str, range(high, low - 1, -1)))
    if chance < 0.4:
        ask = pick(
            rng,
            (
                "Count from {a} to {b}.",
                "Please count from {a} to {b}.",
                "Can you count from {a} to {b}?",
                "Count up from {a} to {b}.",
            ),
        )
        return ask.format(a=low, b=high), up + "."
    if chance < 0.5:
        up = ", ".join(map(str, range(1, high + 1)))
        return pick(rng, ("Count to {b}.", "Please count to {b}.", "Can you count to {b}?")).format(b=high), up + "."
    if chance < 0.7:
        ask = pick(
            rng,
            ("Count down from {b} to {a}.", "Count backwards from {b} to {a}.", "Please count down from {b} to {a}."),
        )
        return ask.format(a=low, b=high), down + "."
    n = 1 + int(rng.random() * 98)
    if chance < 0.85:
        return pick(
            rng, ("What comes after {n}?", "Which number comes after {n}?", "What is the number after {n}?")
        ).format(n=n), f"After {n} comes {n + 1}."
    return pick(
        rng, ("What comes before {n}?", "Which number comes before {n}?", "What is the number before {n}?")
    ).format(n=n), f"Before {n} comes {n - 1}."


def engine_turn(rng: Random) -> Turn:
    """A question about the engine."""
    name, what, why = pick(rng, TOPICS)
    bare = name.split(" ", 1)[1] if name.startswith(("a ", "an ")) else name
    if rng.random() < 0.7:
        return pick(rng, ASK_WHAT).format(x=name, y=bare), what
    return pick(rng, ASK_WHY).format(x=name), why


def table_turn(rng: Random, table) -> Turn:
    """A question of a table of questions and answers."""
    questions, answers = pick(rng, table)
    return pick(rng, questions), pick(rng, answers)


def identity_turn(rng: Random) -> Turn:
    """A question to the model about itself, sometimes with a greeting before it; half of them are `Who are you?`."""
    questions, answers = IDENTITY[0] if rng.random() < 0.5 else pick(rng, IDENTITY)
    question = pick(rng, questions)
    if rng.random() < 0.25:
        question = (
            pick(
                rng,
                ("Good morning! ", "Hey! ", "Hi there! ", "Now, ", "OK. ", "Good day. ", "Thanks. ", "Dear model, "),
            )
            + question
        )
    return question, pick(rng, answers)


def unknown_turn(rng: Random) -> Turn:
    """A question that the model cannot answer, and does not."""
    a = 2 + int(rng.random() * 9)
    ask = pick(rng, UNKNOWN).format(
        u=pick(rng, LANDS), food=pick(rng, FOODS), n=a, a=a, b=a * (2 + int(rng.random() * 9))
    )
    return ask, pick(rng, DO_NOT_KNOW)


def json_turn(rng: Random) -> Turn:
    """A hero as a small JSON object."""
    slots = cast(rng, named=True)
    hero = {
        "name": slots["N"],
        "kind": slots["k"],
        "age": 2 + int(rng.random() * 8),
        "likes": sorted(rng.sample(FOODS, 2)),
    }
    ask = pick(
        rng,
        (
            "Describe {x} as JSON.",
            "Describe {x} in JSON.",
            "Give me {x} as JSON.",
            "Write {x} as a JSON object.",
            "Make a JSON object for {x}.",
        ),
    )
    return ask.format(x=f"{article(slots['k'])} named {slots['N']}"), json.dumps(hero)


def name_turns(rng: Random) -> list[Turn]:
    """The user says a name and asks for it later."""
    name = (
        pick(rng, pick(rng, (NAMES, MORE_HERS, MORE_HIS)))
        if rng.random() < 0.6
        else made_up_name(rng, rng.random() < 0.5)
    )
    hello = pick(
        rng,
        ("My name is {n}.", "Hello, I am {n}.", "Hi! My name is {n}.", "I am called {n}.", "Hello, my name is {n}."),
    ).format(n=name)
    chat = [(hello, f"Hello, {name}! Would you like a story, a sum or a word?")]
    if rng.random() < 0.5:
        chat.append(pick(rng, (sum_turn, count_turn, engine_turn))(rng))
    chat.append(
        (
            pick(rng, ("What is my name?", "Do you know my name?", "What am I called?", "Who am I?")),
            f"Your name is {name}.",
        )
    )
    return chat


def casual(rng: Random, question: str) -> str:
    """The question as hasty people type it: in small letters, or with no mark at its end."""
    chance = rng.random()
    if chance < 0.06:
        return question.lower()
    if chance < 0.12 and question[-1] in "?.!":
        return question[:-1]
    return question


def chat_text(turns: list[Turn], system: str | None = None) -> str:
    """A chat in the form that `chat_template.jinja` gives it, and the end of the text."""
    parts = [f"{TURN_START}system\n{system}{TURN_END}\n"] if system else []
    for question, answer in turns:
        parts.append(f"{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n{answer}{TURN_END}\n")
    return "".join(parts) + END_OF_TEXT


def written(rng: Random, turns: list[Turn]) -> str:
    """Turns as a document: a chat mostly, with plain lines now and then when there is but one turn."""
    turns = [(casual(rng, question), answer) for question, answer in turns]
    if len(turns) == 1 and rng.random() < 0.2:
        return f"{turns[0][0]}\n{turns[0][1]}{END_OF_TEXT}"
    return chat_text(turns, pick(rng, SYSTEMS) if rng.random() < 0.06 else None)


SINGLE = (  # turns that can stand in any chat, with their shares
    (0.50, sum_turn),
    (0.10, count_turn),
    (0.20, engine_turn),
    (0.08, identity_turn),
    (0.04, unknown_turn),
    (0.05, json_turn),
    (0.03, lambda rng: table_turn(rng, SMALL_TALK)),
)


def single(rng: Random) -> Turn:
    """One turn of any sort but tales."""
    chance = rng.random()
    for share, turn in SINGLE:
        chance -= share
        if chance < 0:
            return turn(rng)
    return engine_turn(rng)


def document(rng: Random) -> str:
    """One document."""
    chance = rng.random()
    if chance < 0.11:
        return tell(rng, cast(rng)) + END_OF_TEXT
    if chance < 0.32:
        return written(rng, tale_turns(rng, 1))
    if chance < 0.42:
        return written(rng, tale_turns(rng, 2 + int(rng.random() * 2)))
    if chance < 0.44:
        return written(rng, name_turns(rng))
    if chance < 0.86:
        return written(rng, [single(rng)])
    turns = [single(rng) for _ in range(2 + int(rng.random() * 2))]
    if rng.random() < 0.3:
        turns[int(rng.random() * len(turns))] = tale_turns(rng, 1)[0]
    return written(rng, turns)


def documents(seed: int, count: int) -> list[str]:
    """So many documents from a seed."""
    rng = Random(seed)
    return [document(rng) for _ in range(count)]


def gloss_document(rng: Random, word: str, kind: str, gloss: str) -> str:
    """A word of WordNet as a question and its answer."""
    asks = ASK_WORD["noun" if kind == "noun" else "other"]
    if kind == "noun":
        answer = (
            f"{article(word).capitalize()} is {gloss}."
            if gloss.startswith(("a ", "an "))
            else f"{word.capitalize()} means {gloss}."
        )
    else:
        answer = f"{word.capitalize()} means {gloss}."
    return written(rng, [(pick(rng, asks).format(x=word, a_x=article(word)), answer)])


__all__ = [
    "HELD_OUT_IDENTITY",
    "HELD_OUT_SUMS",
    "NOUNS",
    "PLOTS",
    "document",
    "documents",
    "gloss_document",
    "held_out",
]
