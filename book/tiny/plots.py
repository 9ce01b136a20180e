"""The plots of the tales: for each one a list of beats, for each beat a few ways to tell it.

The slots, filled in by `tales.py`: `N` the hero's name, `k` the hero's kind, `he`, `His` and so on the hero's pronouns;
`F`, `fk`, `fhe` the friend's; `t` a thing with `a_t` its article, `food` something to eat, `place` a place,
`c` a colour, `w` the weather, `n` a small number in words.
"""

# ruff: noqa: E501 (a sentence stays on its line)

from __future__ import annotations

Plot = tuple[tuple[str, ...], ...]

PLOTS: dict[str, Plot] = {
    "lost thing": (
        (
            "One {w} morning {N} could not find {his} {t}.",
            "One {w} day {his} {t} was gone.",
            "{N} had {a_t}, and {he} loved it. One {w} morning it was gone.",
        ),
        (
            "{He} looked under the bed and behind the door, but it was not there.",
            "{N} looked in every corner. There was no {t} anywhere.",
            "{He} searched near {place}, but all {he} found was dust.",
        ),
        ("{N} felt sad and sat down near {place}.", '"Oh dear," said {N}. "Where can it be?"'),
        (
            '{F} the {fk} came by. "Why are you sad?" asked {F}.',
            'Just then {F} the {fk} came along. "What is wrong?" {fhe} asked.',
        ),
        ('"I lost my {t}," said {N}.', '"My {t} is gone," {he} said.'),
        (
            '"I will help you look," said {F}. They looked together, and {F} saw something {c} in the grass. It was the {t}!',
            '"Two look better than one," said {F}. Soon they found the {t} near {place}.',
        ),
        (
            '"Thank you, {F}!" said {N}, and {he} was happy again.',
            "{N} gave {F} some {food} to say thank you. From then on {he} kept the {t} in a safe place.",
        ),
    ),
    "found thing": (
        ("One {w} day {N} found {a_t} near {place}.", "While walking to {place}, {N} found {a_t} on the path."),
        ("It was {c} and it looked new.", "It was old and {c}, and it did not belong to {him}."),
        ('"Whose {t} is this?" {he} asked.', "{N} wanted to keep it, but {he} knew that somebody must miss it."),
        ("{He} went from door to door and asked everyone.", "{N} asked {n} neighbours, but nobody knew."),
        (
            'At last {he} came to {F} the {fk}. "That is my {t}!" said {F}.',
            '{F} the {fk} was sitting at home and looked sad. "Is this your {t}?" asked {N}. "Yes!" said {F}.',
        ),
        (
            "{F} was so glad that {fhe} shared {fhis} {food} with {N}.",
            "{F} gave {N} some {food}, and they ate together.",
        ),
        ("It felt better to give the {t} back than to keep it.", "{N} had found {a_t}, and now {he} had a friend."),
    ),
    "rainy day": (
        (
            "One day it rained and rained, and the water near {place} rose.",
            "One evening a big storm came over {place}.",
        ),
        ("{N} was warm and dry at home.", "{N} sat at home with {his} {t} and listened to the rain."),
        (
            "There was a knock at the door. It was {F} the {fk}, and {fhe} was wet.",
            'Then {he} heard a small voice. "Please let me in," said {F} the {fk}. "My home is full of water."',
        ),
        ('"Come in, come in!" said {N}.', "{N} opened the door at once."),
        ("{He} gave {F} a dry blanket and some {food}.", "They sat close together and ate {food}."),
        (
            "All night the wind blew, but the two were not afraid.",
            "They told each other stories until the rain stopped.",
        ),
        (
            "In the morning the sun came out, and {N} helped {F} to mend {fhis} home.",
            'When the sun came back, {F} said, "A good friend is better than a dry roof."',
        ),
    ),
    "brave night": (
        ("{N} was afraid of the dark.", "At night {N} did not like to go outside."),
        ("One night {he} heard somebody cry near {place}.", "One {w} night there was a small cry from {place}."),
        (
            "{His} heart beat fast, but {he} took {his} {t} and went out.",
            "{N} took a deep breath and {his} {t}, and {he} opened the door.",
        ),
        ("Step by step {he} walked through the dark.", "The trees looked like giants, but {he} went on."),
        ("There {he} found {F} the {fk}, who had lost the way.", "Near {place} sat {F}, a little {fk}, all alone."),
        ('"Do not be afraid," said {N}. "I will take you home."', '"I am here now," said {N}, and {he} took {F} home.'),
        (
            "After that night {N} was not afraid of the dark any more.",
            '"You are very brave," said {F}. And {N} knew that it was true.',
        ),
    ),
    "the race": (
        (
            "{F} the {fk} was the fastest of all, and {fhe} said so every day.",
            "Every year there was a race to {place}, and {F} the {fk} always won.",
        ),
        ('"I will race you," said {N}.', "{N} wanted to run too, though {he} was small and slow."),
        ("Everyone came to see the race.", "On a {w} morning they stood side by side and waited for the bell."),
        ("{F} ran ahead like the wind.", "Off went {F}, and soon {fhe} was far ahead."),
        ("But then {F} fell over {a_t} and hurt {fhis} foot.", "Halfway there {F} slipped on a wet stone and fell."),
        (
            "{N} could have won. But {he} stopped and helped {F} up.",
            "{N} came by, and {he} did not run on. {He} helped {F}.",
        ),
        (
            "They crossed the line together, and everyone cheered for {N}.",
            '"You won today," said {F}, "for you have the biggest heart."',
        ),
    ),
    "growing seed": (
        (
            "One spring {N} planted a seed near {place}.",
            "{F} the {fk} gave {N} a small {c} seed, and {he} put it in the ground.",
        ),
        ("Every day {he} gave it water.", "{He} gave it water in the morning and sang to it in the evening."),
        ("But nothing grew. {N} waited {n} days.", "A week went by, and there was only brown earth."),
        ('"It will never grow," said {N}.', "{N} wanted to dig it up and look."),
        ('"Wait a little longer," said {F} the {fk}.', '"Good things need time," said {F} the {fk}.'),
        ("Then, on a {w} morning, there was a green leaf!", "One {w} morning a tiny leaf looked out of the earth."),
        (
            "In summer it was full of {food}, and {N} shared it with everyone.",
            "By autumn it was taller than {N}, and {he} was glad that {he} had waited.",
        ),
    ),
    "new neighbour": (
        (
            "One day a new neighbour came to live near {place}. It was {F} the {fk}.",
            "{F} the {fk} was new, and {fhe} did not know anyone.",
        ),
        ("Some of the others did not want to talk to {F}.", '"A {fk} is strange," said some of the others.'),
        ("{N} saw that {F} was lonely.", 'But {N} thought, "I was new here once too."'),
        ("{He} took {a_t} and some {food} and knocked on {F}'s door.", "So {he} made {food} and carried it to {F}."),
        (
            '"Welcome!" said {N}. "Would you like to play with me?"',
            '"Hello, I am {N}," {he} said. "Let us be friends."',
        ),
        ("{F} smiled for the first time.", "{F} had {a_t} too, and {fhe} showed {N} how to use it."),
        (
            "Soon everyone wanted to play with {F}, and nobody was lonely any more.",
            "From that day on they met near {place} every morning.",
        ),
    ),
    "the bridge": (
        (
            "{N} wanted to go to {place}, but the bridge was broken.",
            "After the storm the little bridge near {place} was gone.",
        ),
        (
            'On the other side stood {F} the {fk}. "I cannot come across," {fhe} called.',
            '"How can we visit each other now?" asked {F} the {fk} from the other side.',
        ),
        ("{N} thought for a long time.", "{N} looked at the water and had an idea."),
        ("{He} brought wood, and {F} brought {a_t}.", "{He} found {n} long branches and tied them together."),
        (
            "They worked the whole {w} day, each from one side.",
            "It was hard work, and twice the wood fell into the water.",
        ),
        (
            "In the evening they met in the middle and laughed.",
            "At last {N} put one foot on the new bridge. It was strong!",
        ),
        (
            "They sat on the bridge and ate {food} while the sun went down.",
            "And that is why there is a {c} bridge near {place} today.",
        ),
    ),
    "sharing": (
        ("{N} had a whole basket of {food}.", "One {w} day {N} found more {food} than {he} could eat."),
        ('"It is all mine," {he} thought.', "{He} hid it at home, for {he} did not want to share."),
        (
            "{F} the {fk} came by and looked hungry.",
            'Then came {F} the {fk}. "I have had nothing to eat today," {fhe} said.',
        ),
        ("At first {N} said nothing.", "{N} looked at the {food} and then at {F}."),
        (
            'Then {he} said, "Sit down. There is enough for two."',
            "{He} thought about it, and then {he} gave half of it to {F}.",
        ),
        ("They ate and talked and laughed.", "The {food} tasted much better than before."),
        (
            "The next day {F} came back with {a_t} as a gift for {N}.",
            "{N} learned that food is best when it is shared.",
        ),
    ),
    "the music": (
        ("{N} wanted to make music, but {he} had only {a_t}.", "{N} loved to sing, but {his} voice was small."),
        ("{He} tried every day near {place}.", "{He} went to {place}, where nobody could hear {him}."),
        ("Somebody listened behind a tree. It was {F} the {fk}.", "But {F} the {fk} heard it and came closer."),
        ('"That is a lovely song," said {F}.', '"Please do not stop," said {F}. "I can drum."'),
        (
            "So they played together: {N} sang, and {F} drummed on {a_t}.",
            "{F} brought a drum, and they practised {n} evenings.",
        ),
        (
            "One {w} evening all the neighbours came to listen.",
            "At the big feast they stood in front of everyone and played.",
        ),
        ("Everybody clapped, and {N} bowed.", "{N} was so happy that {he} sang all the way home."),
    ),
    "the birthday": (
        ("It was {N}'s birthday, but nobody said a word.", "{N} woke up early, for it was {his} birthday."),
        ("{He} went to {place}, but {he} met no one.", "{He} waited for a knock at the door, but nobody came."),
        ('"They have all forgotten me," {he} thought.', "{N} felt very small and very sad."),
        (
            "In the evening {F} the {fk} led {him} to a {c} light near {place}.",
            'Then {F} the {fk} came and said, "Come with me, quick!"',
        ),
        (
            '{He} went closer. "Surprise!" called all the friends.',
            'Behind the trees stood everyone. "Happy birthday, {N}!" they called.',
        ),
        ("They had {food}, and they had music.", "{F} gave {him} {a_t} with a {c} ribbon."),
        ("It was the best birthday of all.", '"You are the best friends in the world," said {N}.'),
    ),
    "the star": (
        ("One night {N} saw a star fall behind {place}.", "{N} looked at the sky and wished for a star."),
        ('"I will find it," {he} said, and {he} took {his} {t}.', "{He} put on {his} coat and went out to find it."),
        ("{He} walked over {n} hills.", "The way was long and dark, but {he} did not turn back."),
        (
            "Near the water {he} met {F} the {fk}, who could not sleep.",
            "On a hill sat {F} the {fk}. {FHe} was looking for the star too.",
        ),
        (
            "There, in the water, was the star. But when {N} touched it, it was gone.",
            "At last they saw it shine in the pond. It was only a picture of the star above.",
        ),
        (
            '"It is still in the sky," said {F}. "There it can shine for everyone."',
            '"Let it stay up there," said {F}, "so that we can all see it."',
        ),
        (
            "They sat down and counted stars until they fell asleep.",
            "{N} smiled, and they walked home under the stars.",
        ),
    ),
    "learning to swim": (
        ("All the others could swim, but {N} could not.", "{N} was afraid of the water near {place}."),
        ("{He} stood at the edge and watched.", 'The others called, "Come in!" But {he} only shook {his} head.'),
        ('"I was afraid too," said {F} the {fk}. "I will show you."', "{F} the {fk} saw it and sat down beside {him}."),
        ("First {N} put one foot into the water. It was cold!", "They began where the water was low."),
        ("{N} tried {n} times and went under {n} times.", "{F} held {him}, and {N} kicked and splashed."),
        ("Then, on a {w} day, {F} let go, and {N} swam!", "And suddenly {he} floated like {a_t}."),
        (
            '"I can swim!" called {N}, and everyone was proud of {him}.',
            "After that nobody could get {N} out of the water.",
        ),
    ),
    "the wise friend": (
        (
            "{N} had a question that nobody could answer: where does the wind go?",
            '"Where does the wind sleep?" asked {N} one {w} day.',
        ),
        (
            "{He} asked the others, but they only laughed.",
            "{He} asked {n} neighbours, and each gave a different answer.",
        ),
        (
            "So {he} packed {a_t} and some {food} and went to {place}.",
            "Then {he} heard of somebody wise who lived near {place}.",
        ),
        ("There lived {F}, a very old {fk}.", "{He} walked for a whole day and found {F}, a very old {fk}."),
        (
            '{F} thought for a while. "I do not know," {fhe} said.',
            '"That is a good question," said {F} the {fk}, "and I do not know the answer."',
        ),
        ('"But we can follow it and see."', '"Let us find out together," said {F}.'),
        (
            "They followed the wind until evening, and they became friends.",
            "{N} went home happy, for a good question had given {him} a good friend.",
        ),
    ),
    "the lie": (
        (
            "{F} the {fk} had a fine {t}, and {N} broke it by accident.",
            "One {w} day {N} borrowed {a_t} from {F} the {fk}, and it broke.",
        ),
        ("{He} was afraid and hid it near {place}.", '"It was the wind," {he} told {F} the {fk}.'),
        ("That night {he} could not sleep.", "But there was a heavy feeling in {his} belly."),
        ("In the morning {he} went to {F}'s door.", "{He} could not even eat {his} {food}. So {he} went to see {F}."),
        (
            '"I broke your {t}," {he} said. "I am sorry."',
            '"I did not tell the truth," said {N}. "I broke your {t}, and I am sorry."',
        ),
        (
            '"Thank you for telling me," said {F}. "We can mend it."',
            '{F} was quiet for a moment. "A {t} can be mended," {fhe} said.',
        ),
        (
            "They mended it together, and it was almost as good as new.",
            "{N} felt light again, and that night {he} slept well.",
        ),
    ),
    "the map": (
        ("In an old {t} {N} found a map.", "One {w} day {N} found a {c} map near {place}."),
        ("It showed a way to {place} and a big cross.", 'On it stood: "{n} steps from the old tree."'),
        (
            '"A treasure!" said {N}, and {he} ran to {F} the {fk}.',
            "{He} showed it to {F} the {fk}, who loved adventures.",
        ),
        ("They took a spade and went on their way.", "They packed {food} and left at once."),
        ("They counted the steps and began to dig.", "They walked, they counted, and they dug until they were tired."),
        (
            "They found a box. In it was only {a_t} and a letter.",
            'There was a small box with a letter: "The treasure is the one who digs with you."',
        ),
        ("{N} looked at {F}, and both had to laugh.", "{N} kept the letter, and {F} kept the map."),
    ),
    "the snow": (
        ("In winter the snow fell, and {place} was white.", "One morning everything was white with snow."),
        ("{N} ran outside and made a big ball of snow.", "{N} wanted to build something that nobody had ever built."),
        ("{F} the {fk} came out too, with {a_t}.", '"May I help?" asked {F} the {fk}.'),
        ("Together they built a snow {k} as tall as a door.", "They rolled {n} balls and put one on top of the other."),
        ("They gave it a {c} scarf and a nose.", "{N} gave it {his} own {c} scarf."),
        ("Then the sun came, and the snow {k} grew smaller every day.", "When spring came, it melted away."),
        (
            '"It will come back next winter," said {F}, "and so will we."',
            '{N} was a little sad, but {F} said, "Now there is water for the flowers."',
        ),
    ),
    "the sick friend": (
        (
            "{F} the {fk} did not come out to play.",
            "One {w} morning {N} waited near {place}, but {F} the {fk} did not come.",
        ),
        ("{N} went to {F}'s home. {F} was in bed and felt sick.", '"I am sick," said {F} in a small voice.'),
        ('"I will take care of you," said {N}.', "{N} put a blanket over {F} and made a fire."),
        ("{He} cooked {food} and told {F} funny stories.", "{He} brought {food} and {a_t} to play with."),
        ("{N} came every day for {n} days.", "Every evening {he} sat near the bed until {F} fell asleep."),
        ("Then {F} could get up again.", "At last {F} opened the window and laughed."),
        (
            '"You are better than medicine," said {F}.',
            "When {N} had a cold later, guess who came with {food}? It was {F}.",
        ),
    ),
    "the little boat": (
        ("{N} built a little boat out of {a_t}.", "{N} had a small {c} boat."),
        ("On a {w} day {he} took it to the water near {place}.", '"I want to see where the river goes," {he} said.'),
        ("{F} the {fk} wanted to come too.", '"Take me with you," said {F} the {fk}.'),
        ("They floated past hills and houses and waved at everyone.", "The river was quick, and they held on tight."),
        ("Then the boat hit a stone and turned round and round.", "Suddenly there was water in the boat."),
        (
            "{F} took {a_t} and pushed the boat free.",
            "{N} steered, and {F} scooped out the water as fast as {fhe} could.",
        ),
        (
            "In the evening they came home, tired and happy.",
            "They never saw the end of the river, but they had a fine story to tell.",
        ),
    ),
    "the quiet one": (
        ("{N} was so quiet that the others often forgot {him}.", "Everyone talked, but {N} liked to listen."),
        (
            "One {w} day they all went to {place}.",
            "One day everyone was playing near {place}, and they were very loud.",
        ),
        ("Only {N} heard a small sound.", '"Hush," said {N}. "I hear something."'),
        ("It was {F} the {fk}. {FHe} was stuck under {a_t}.", "Somebody was calling for help. It was {F} the {fk}."),
        (
            "{N} showed the others the way, and together they got {F} out.",
            "{N} ran and pulled {F} out with all {his} strength.",
        ),
        ('"Only you heard me," said {F}.', '"How did you hear me?" asked {F}. "I was listening," said {N}.'),
        ("After that they all learned to listen a little more.", "From then on nobody forgot {N} again."),
    ),
    "the wish": (
        (
            "Near {place} {N} found {a_t}, and when {he} rubbed it, it spoke.",
            "One {w} evening {N} caught a {c} fish, and it could speak.",
        ),
        ('"You have one wish," it said.', '"Be kind to me," it said, "and I will give you one wish."'),
        (
            "{N} thought of {food}, and of gold, and of a bigger house.",
            "{N} could not decide. {He} thought for {n} days.",
        ),
        (
            "Then {he} saw {F} the {fk}, who could not walk well.",
            "{F} the {fk} sat nearby. {FHe} had been ill for a long time.",
        ),
        ('"I wish that {F} is well again," said {N}.', '"Please make {F} well," {he} said.'),
        ("And at once {F} jumped up and danced.", "There was a {c} light, and {F} could run again."),
        (
            "{N} had no gold, but {he} had someone to run with.",
            '"You gave me your only wish," said {F}, and {fhe} never forgot it.',
        ),
    ),
    "the big cake": (
        (
            "{N} wanted to bake the biggest cake of all.",
            'There was a feast at {place}, and {N} said, "I will bake a cake."',
        ),
        ("{He} took flour and {n} eggs and a lot of {food}.", "{He} mixed everything in {a_t}."),
        ("But {he} forgot it in the oven, and the cake turned black.", "But the cake fell on the floor."),
        (
            '"Now it is all over," said {N}, and a tear ran down {his} face.',
            "{N} sat on the floor and did not know what to do.",
        ),
        (
            '{F} the {fk} looked in. "Let us try again," {fhe} said.',
            '"My first cake was much worse," said {F} the {fk}, and {fhe} took a spoon.',
        ),
        ("This time they watched the oven together.", "They baked it again, and {F} told jokes until it was done."),
        ("It was not the biggest cake, but it was the best.", "Everyone had a piece, and {N} got the first one."),
    ),
    "the echo": (
        ('One {w} day {N} stood near {place} and called, "Hello!"', "{N} walked to {place} and sang a song."),
        ('"Hello!" said a voice from the hill.', "And somebody far away sang it back."),
        (
            '"Who are you?" called {N}. "Who are you?" said the voice.',
            '{N} was cross. "Stop that!" {he} called. "Stop that!" said the voice.',
        ),
        ("{N} ran home and told {F} the {fk} about it.", "{F} the {fk} heard it and laughed."),
        ('"Say something kind," said {F}.', '"That is the echo," said {F}. "Be kind to it, and it is kind to you."'),
        (
            'So {N} called, "I like you!" And the voice said, "I like you!"',
            '{N} called, "Let us be friends!" And from the hill came, "Let us be friends!"',
        ),
        ("{N} laughed, and the hill laughed too.", "Ever since then {N} speaks kindly, even to hills."),
    ),
    "the long way": (
        (
            "{N} had to bring {a_t} to {his} grandmother near {place}.",
            '"Bring some {food} to {place}," said {his} mother, "and do not stop on the way."',
        ),
        ("{He} walked and hummed a tune.", "It was a {w} day, and the path was long."),
        (
            "After a while {he} met {F} the {fk}, who had {n} heavy bags.",
            "At a turn of the path sat {F} the {fk} with a broken cart.",
        ),
        ('"Can you help me?" asked {F}.', "{N} had no time, but {he} stopped."),
        ("{N} helped, and it took a long time.", "Together they mended it and loaded it again."),
        (
            '"Now I am late," said {N}. "Get in," said {F}, "I will take you there."',
            "Then {F} knew a short way through the hills, and they went side by side.",
        ),
        (
            "So {N} was there before the sun went down, and {he} had a new friend.",
            "{N} came just in time, and everyone ate {food} together.",
        ),
    ),
    "the clock": (
        (
            "The big clock near {place} stopped, and nobody knew what time it was.",
            "One {w} morning the old clock near {place} did not ring.",
        ),
        ("Everyone was late, and the {food} got cold.", "Some went to bed at noon, and some got up at midnight."),
        ('"I will look at it," said {N}, and {he} climbed up.', "{N} was small enough to climb inside."),
        (
            "Inside, among the wheels, {he} found {F} the {fk}, fast asleep.",
            "Between two wheels {he} found {a_t}, and beside it slept {F} the {fk}.",
        ),
        (
            '"It is so warm in here," said {F}. "I did not know that I stopped the clock."',
            '"Oh!" said {F}. "I only wanted to rest."',
        ),
        ("{N} helped {F} to find a better bed.", '"You can sleep at my house," said {N}.'),
        (
            "And the clock went tick, tock, as if nothing had happened.",
            "Then the clock rang {n} times, and everyone cheered.",
        ),
    ),
    "the kite": (
        ("{N} had a {c} kite that flew higher than the trees.", "On a {w} day {N} made a kite out of paper and {a_t}."),
        ("The wind took it and pulled hard.", "{He} ran up the hill, and the kite danced in the sky."),
        (
            "Then the string broke, and the kite flew away over {place}.",
            "Snap! The string broke, and the kite was gone.",
        ),
        ("{N} ran after it until {he} was out of breath.", "{N} looked up until {he} could not see it any more."),
        (
            "{F} the {fk} lived on the other side of {place}. {FHe} had never had a toy.",
            "Far away {F} the {fk} found the kite in {fhis} garden.",
        ),
        ("When {N} came, {F} was holding the kite and smiling.", '"Is it yours?" asked {F}, and {fhe} held it tight.'),
        ('"We can fly it together," said {N}.', "{N} tied a new string, and they took turns until the evening."),
    ),
}
