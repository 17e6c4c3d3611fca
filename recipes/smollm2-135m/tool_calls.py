"""Sentences to an assistant at home and the tool call that each asks for: the data of this folder's recipes.

    python recipes/smollm2-135m/tool_calls.py     # writes tool_calls/train.jsonl and tool_calls/heldout.jsonl

A sentence is a pattern with names, times and numbers in it; all patterns occur equally often. No sentence stands in both files.
One name in five occurs in held-out sentences only, so that it has to be copied and cannot be known by heart. The answer is JSON
on one line, its keys in the order of the table.
"""

import itertools
import json
import random
from pathlib import Path
from typing import Any

SEED = 7
TRAIN, HELDOUT = 800, 54
SYSTEM = "Answer with a tool call."
FOLDER = Path(__file__).with_name("tool_calls")

VALUES = {
    "person": "Anna, Ben, Carla, Deniz, Emil, Farah, Grace, Hiro, Ines, Jonas, Kofi, Lena, Mateo, Nadia, Omar, Priya, Quinn, "
    "Rosa, Sven, Tara, Umar, Vera, Wanda, Yusuf, Zoe",
    "city": "Oslo, Lima, Paris, Kyoto, Accra, Porto, Quito, Dublin, Madrid, Nairobi, Toronto, Vienna, Warsaw, Seoul, Hanoi, "
    "Lisbon, Prague, Boston, Havana, Jakarta",
    "day": "today, tomorrow, on Monday, on Tuesday, on Wednesday, on Thursday, on Friday, on Saturday, on Sunday",
    "time": "6:15, 6:40, 7:00, 7:20, 7:45, 8:05, 8:30, 9:10, 9:50, 10:25, 11:00, 11:35, 12:20, 13:15, 14:40, 15:05, 16:30, "
    "17:55, 18:10, 19:25, 20:45, 21:30",
    "room": "kitchen, bedroom, bathroom, hall, office, garage, cellar, attic, nursery, living room",
    "device": "lamp, heater, fan, radio, television, projector, humidifier, air purifier, coffee machine, dishwasher",
    "item": "milk, rice, apples, coffee, candles, tomatoes, batteries, flour, olive oil, soap, lentils, paper towels, "
    "oat flakes, onions, toothpaste, dark chocolate",
    "amount": "2, 3, 5, 8, 12, 20, 35, 40, 75, 90, 120, 250, 400",
    "text": "I am running late, the parcel is here, dinner is ready, call me back, the meeting is over, I found the keys, "
    "the train is cancelled, see you at noon, the door is open, bring an umbrella, the cake is done, we won the match",
    "song": "Blue Train, Night Rain, Old Harbour, Paper Moon, Silver Road, Small Hours, Green River, Winter Song, Long Way Home, "
    "Morning Light, Red Balloon, Seven Bridges",
    "people": "2, 3, 4, 5, 6, 7, 8, 9, 10",
    "place": "Casa Verde, The Anchor, Golden Dragon, Little Nile, Chez Marie, Sakura, Old Mill, Blue Plate, La Piazza, Red Fort",
    "minutes": "1, 3, 4, 5, 8, 10, 12, 15, 20, 25, 30, 45, 50",
    "unit": "miles to kilometres, kilometres to miles, pounds to kilograms, kilograms to pounds, cups to millilitres, "
    "inches to centimetres",
}
# tool -> its patterns. What stands in braces is an argument; {device} {state} are "lamp" and "on", for instance.
TOOLS = {
    "set_alarm": ("Wake me {day} at {time}.", "Set an alarm for {time} {day}.", "I have to be up {day} at {time}."),
    "set_timer": (
        "Set a timer for {minutes} minutes.",
        "Tell me when {minutes} minutes are over.",
        "Timer, {minutes} minutes!",
    ),
    "send_message": ("Tell {person} that {text}.", "Write to {person}: {text}.", "Send {person} a message, {text}."),
    "get_weather": (
        "What will the weather be like in {city} {day}?",
        "Do I need a coat in {city} {day}?",
        "Weather for {city} {day}, please.",
    ),
    "switch": (
        "Turn {state} the {device} in the {room}.",
        "Switch the {device} in the {room} {state}.",
        "The {device} in the {room} should be {state}.",
    ),
    "add_to_list": ("Put {item} on the shopping list.", "We are out of {item}.", "Remind me to buy {item}."),
    "play_music": (
        "Play {song} in the {room}.",
        "I want to hear {song} in the {room}.",
        "Put on {song} in the {room}.",
    ),
    "book_table": (
        "Book a table for {people} at {place} {day} at {time}.",
        "We are {people} and want to eat at {place} {day} at {time}.",
        "Reserve {place} {day} at {time} for {people} people.",
    ),
    "convert": ("How much is {amount} {unit}?", "Convert {amount} {unit}.", "What is {amount} {unit}?"),
}
ARGUMENTS = {
    "set_alarm": ("time", "day"),
    "set_timer": ("minutes",),
    "send_message": ("person", "text"),
    "get_weather": ("city", "day"),
    "switch": ("device", "room", "state"),
    "add_to_list": ("item",),
    "play_music": ("song", "room"),
    "book_table": ("place", "people", "day", "time"),
    "convert": ("amount", "unit"),
}
NUMBERS = ("amount", "people", "minutes")
COPIED = ("person", "city", "item", "song", "place", "text")  # of which some are held out


def values(heldout: bool) -> dict[str, list[str]]:
    """Return what may stand for each argument; in held-out sentences names that no training sentence has are among them."""
    found = {"state": ["on", "off"]}
    for name, text in VALUES.items():
        every = text.split(", ")
        found[name] = [value for number, value in enumerate(every) if heldout or name not in COPIED or number % 5]
    return found


def row(tool: str, pattern: str, chosen: dict[str, str]) -> dict[str, Any]:
    """Return a chat: a sentence, and its call."""
    arguments: dict[str, Any] = {}
    for name in ARGUMENTS[tool]:
        arguments[name] = int(chosen[name]) if name in NUMBERS else chosen[name].removeprefix("on ")
    call = json.dumps({"tool": tool, "arguments": arguments})
    said = {"system": SYSTEM, "user": pattern.format(**chosen), "assistant": call}
    return {"messages": [{"role": role, "content": text} for role, text in said.items()]}


def sentence(chat: dict[str, Any]) -> str:
    """Return what the user says."""
    return str(chat["messages"][1]["content"])


def rows(count: int, heldout: bool, taken: set[str], random_numbers: random.Random) -> list[dict[str, Any]]:
    """Draw so many chats, whose sentences are not `taken`; patterns take turns, and with few sentences they repeat some."""
    known, drawn = values(heldout), []
    turns = itertools.cycle([(tool, pattern) for tool, patterns in TOOLS.items() for pattern in patterns])
    while len(drawn) < count:
        tool, pattern = next(turns)
        while True:
            chosen = {name: random_numbers.choice(known[name]) for name in (*ARGUMENTS[tool], "state")}
            chat = row(tool, pattern, chosen)
            if sentence(chat) not in taken:
                break
        drawn.append(chat)
    random_numbers.shuffle(drawn)
    return drawn


def in_turns(chats: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Let the tools take turns, each with its longest sentence first: `eval` shows the first chats."""
    by_tool: dict[str, list[dict[str, Any]]] = {}
    for chat in sorted(chats, key=lambda chat: -len(sentence(chat))):
        by_tool.setdefault(json.loads(chat["messages"][2]["content"])["tool"], []).append(chat)
    return [chat for turn in itertools.zip_longest(*by_tool.values()) for chat in turn if chat]


def main() -> None:
    random_numbers, taken = random.Random(SEED), set[str]()
    FOLDER.mkdir(exist_ok=True)
    for name, count, heldout in (("heldout", HELDOUT, True), ("train", TRAIN, False)):
        made = rows(count, heldout, taken, random_numbers)
        made = in_turns(made) if heldout else made
        (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in made))
        taken |= {sentence(chat) for chat in made}


if __name__ == "__main__":
    main()
