"""Questions about everyday things, each with an answer of one sentence and one of three: the data of dpo.yaml.

    python recipes/smollm2-135m/one_sentence.py     # writes one_sentence/train.jsonl and one_sentence/heldout.jsonl

The questions and answers were written for Brigade, and stand under its licence. Both answers of a pair begin with the same
sentence; the worse one goes on. What they differ in is therefore only where an answer ends. Each thing that is trained on is
asked about in all FORMS. One thing in three is held out, and asked about once, in forms that take turns: no answer stands in
both files.
"""

import json
import re
from pathlib import Path

FOLDER = Path(__file__).with_name("one_sentence")
FORMS = ("What is {}?", "Tell me about {}.", "Can you explain {}?", "Please describe {}.", "What do you know about {}?")
HELD_OUT = 3  # one thing in so many

# A thing, and what the longer answer says of it; its first sentence is the shorter one.
THINGS = """
a volcano | A volcano is an opening in the Earth's crust through which molten rock and gas escape. Some erupt every few years, and others sleep for centuries. The ash makes the soil around them fertile.
a glacier | A glacier is a large mass of ice that slowly flows downhill. It forms where more snow falls than melts. Its weight carves valleys into the rock.
a bicycle | A bicycle is a vehicle with two wheels that its rider drives with pedals. A chain carries the force to the rear wheel. It needs far less energy than walking.
a library | A library is a place that lends books to the people who visit it. Most keep newspapers and films, too. A librarian helps to find what one is looking for.
rain | Rain is water that falls from clouds in drops. The drops form when vapour cools and gathers on dust. Without it most plants could not live.
bread | Bread is a food that is baked from flour and water. Yeast makes the dough rise. Almost every country has a kind of its own.
a compass | A compass is an instrument whose needle points to magnetic north. Sailors have used it for hundreds of years. Iron nearby can mislead it.
the Moon | The Moon is the only natural satellite of the Earth. It takes about a month to go around us. Its gravity causes the tides.
a bridge | A bridge is a structure that carries a road or a railway over an obstacle. Arches, beams and cables hold it up. The longest ones are many kilometres long.
a bee | A bee is a flying insect that gathers nectar and pollen from flowers. Many live in hives with a queen. Fruit trees depend on their visits.
a mirror | A mirror is a smooth surface that reflects light. Most are made of glass with a thin coat of metal. Telescopes use curved ones to collect light.
salt | Salt is a mineral that people use to season and preserve food. It comes from the sea or from mines. The body needs a little of it each day.
a clock | A clock is a device that shows the time of day. Older ones have a pendulum or a spring. Atomic clocks are the most exact.
a forest | A forest is a large area that is covered with trees. Many animals find food and shelter there. Its soil stores rain and keeps streams clear.
a piano | A piano is an instrument whose strings are struck by hammers when keys are pressed. It has 88 keys as a rule. Pedals let the notes ring on.
a river | A river is a stream of fresh water that flows toward the sea or a lake. It begins at a spring or a glacier. Towns were often built on its banks.
a magnet | A magnet is an object that attracts iron. Each has a north and a south pole. Motors and loudspeakers contain one.
paper | Paper is a thin sheet that is made of plant fibres. It was invented in China about two thousand years ago. Old paper can be made into new.
a camera | A camera is a device that records pictures with light. A lens throws the picture on a sensor or a film. The shutter decides how long light comes in.
a desert | A desert is a dry region where very little rain falls. Days can be hot and nights cold. Its plants store water in thick leaves or stems.
cheese | Cheese is a food that is made from the curd of milk. Some kinds ripen for years. Mould gives others their taste.
an elevator | An elevator is a cabin that carries people between the floors of a building. A motor pulls it by steel cables. Brakes hold it if a cable breaks.
a telescope | A telescope is an instrument that makes distant objects look nearer. It collects light with lenses or mirrors. The largest ones stand on high mountains.
a candle | A candle is a stick of wax with a wick that burns to give light. The flame melts the wax, which feeds it. People used it before there were lamps.
snow | Snow is frozen water that falls from clouds in small crystals. No two flakes look quite alike. A thick cover keeps the ground warm.
a whale | A whale is a very large mammal that lives in the sea. It has to come up to breathe. Some kinds sing over long distances.
a garden | A garden is a piece of land where people grow flowers, fruit or vegetables. It needs water, light and care. Many are a place to rest, too.
a map | A map is a drawing that shows where places lie. Its scale says how far they are apart. Colours often stand for heights.
glass | Glass is a hard and clear material that is made by melting sand. It can be blown or poured into shapes. Used glass is melted again.
a school | A school is a place where children learn together from teachers. Lessons are divided into subjects. Most countries require some years of it.
a lighthouse | A lighthouse is a tower whose lamp guides ships at night. It warns of rocks and shallow water. Each has a rhythm of its own.
coffee | Coffee is a drink that is brewed from roasted beans. Caffeine in it keeps people awake. The plant grows in warm countries.
a train | A train is a row of connected vehicles that runs on rails. Engines with electric or diesel power pull it. It carries many people with little energy.
an umbrella | An umbrella is a folding roof that is held over the head against rain. Thin ribs spread its cloth. Light ones serve against the sun.
an earthquake | An earthquake is a sudden shaking of the ground. It happens when plates of the crust slip past each other. Strong ones can destroy whole towns.
a battery | A battery is a device that stores energy and gives it back as electricity. Two different materials react inside it. Some can be charged again.
honey | Honey is a sweet food that bees make from nectar. They store it in combs for the winter. It keeps for years.
a frog | A frog is a small animal that lives in water and on land. Its young are called tadpoles. It catches insects with its tongue.
a museum | A museum is a building where valuable things are kept and shown. Some are about art, and others about science. Guides explain what visitors see.
wind | Wind is air that moves from high to low pressure. The sun causes it by warming the ground unevenly. Mills and turbines use its force.
a microscope | A microscope is an instrument that makes tiny things visible. Lenses enlarge what lies under it. Doctors use it to find germs.
a castle | A castle is a large building with thick walls that protected those who lived there. Many stand on hills or behind a moat. Today visitors walk through them.
rice | Rice is a grain that grows in wet fields. It feeds more than half of the world. There are thousands of kinds.
a kite | A kite is a light frame with cloth that flies in the wind on a string. A tail keeps it steady. People in Asia have built it for ages.
an island | An island is a piece of land with water all around it. Some were made by volcanoes. Animals on it may live nowhere else.
a thermometer | A thermometer is an instrument that measures temperature. A liquid in it expands when it gets warm. Newer ones use a sensor.
silk | Silk is a soft and strong thread that silkworms spin. It was carried from China to Europe. One cocoon gives hundreds of metres.
a robot | A robot is a machine that does work by following a program. Many weld and paint in factories. Sensors tell it what is around it.
a rainbow | A rainbow is an arc of colours that appears when sunlight meets drops of water. Each colour is bent by a different angle. One sees it with the sun behind one's back.
a violin | A violin is an instrument with four strings that is played with a bow. Its body of wood makes the sound louder. An orchestra has many of them.
a market | A market is a place where people meet to buy and sell goods. Farmers bring fruit and vegetables. Prices depend on what is scarce.
an owl | An owl is a bird that hunts at night. Its soft feathers make no noise. It can turn its head very far.
a dam | A dam is a wall that holds back the water of a river. The lake behind it supplies towns. Turbines in it make electricity.
soap | Soap is a substance that helps water to wash away grease. It is made from fats and lye. Clean hands prevent many diseases.
the Sun | The Sun is the star at the centre of our solar system. It turns hydrogen into helium. Its light takes eight minutes to reach us.
a hospital | A hospital is a place where ill and injured people are treated. Doctors and nurses work there day and night. Some teach students as well.
a tunnel | A tunnel is a passage that leads under the ground or through a mountain. Machines drill it through the rock. Fans bring in fresh air.
wool | Wool is the hair of sheep, which is spun into yarn. It keeps warm even when it is wet. Sheep are shorn once a year.
a cactus | A cactus is a plant that stores water in its thick stem. Spines protect it from animals. It can live for months without rain.
a sailboat | A sailboat is a boat that is moved by the wind in its sails. A keel keeps it upright. It can go against the wind in a zigzag.
a newspaper | A newspaper is a publication that reports what has happened lately. Reporters write its articles. Many people read it on a screen.
a spider | A spider is an animal with eight legs that catches insects. Many kinds spin webs. Few are dangerous to people.
chocolate | Chocolate is a sweet food that is made from cocoa beans. The beans are roasted and ground. Sugar and milk make it mild.
a wheel | A wheel is a round part that turns on an axle. It was invented more than five thousand years ago. Carts and cars roll on it.
a waterfall | A waterfall is a place where a river drops over a steep edge. The water wears the rock away. The spray makes rainbows.
a passport | A passport is a document that proves who a traveller is. A state gives it to its citizens. Officers check it at the border.
an apple | An apple is a round fruit that grows on trees. It is eaten raw, baked or as juice. Thousands of kinds are known.
a submarine | A submarine is a ship that can travel under water. Tanks are filled to make it sink. Its crew sees with sonar.
a dictionary | A dictionary is a book that explains the words of a language. They stand in the order of the alphabet. Some translate into another language.
lightning | Lightning is a large spark between clouds or between a cloud and the ground. Thunder is the sound of the air that it heats. A metal rod leads it into the earth.
a bakery | A bakery is a shop that makes and sells bread and cakes. Its ovens are hot before dawn. The smell draws people in.
a penguin | A penguin is a bird that swims and cannot fly. Most kinds live in the cold south. Parents take turns to keep the egg warm.
"""  # noqa: E501


def sentences(text: str) -> list[str]:
    """Return a text's sentences: they end at . ! or ? before a blank and a capital letter, digit or mark, and at the end of a
    line, so that each item of a list is one, whose number is none."""
    return [
        part
        for line in text.splitlines()
        for part in re.split(r"(?<=[.!?])(?<!^\d\.)[\"')*]*\s+(?=[A-Z0-9\"'`(*])", line.strip())
        if part
    ]


def things() -> list[tuple[str, str]]:
    """Return each thing, and the longer answer."""
    found = []
    for line in THINGS.strip().splitlines():
        thing, _, answer = line.partition(" | ")
        found.append((thing, answer))
    return found


def row(form: str, thing: str, answer: str) -> dict[str, str]:
    """Return a pair: a question, the first sentence of its answer, and the whole answer."""
    return {"prompt": form.format(thing), "chosen": sentences(answer)[0], "rejected": answer}


def main() -> None:
    heldout, train = [], []
    for number, (thing, answer) in enumerate(things()):
        if number % HELD_OUT:
            train += [row(form, thing, answer) for form in FORMS]
        else:
            heldout.append(row(FORMS[len(heldout) % len(FORMS)], thing, answer))
    FOLDER.mkdir(exist_ok=True)
    for name, rows in (("train", train), ("heldout", heldout)):
        (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))


if __name__ == "__main__":
    main()
