"""Texts that have nothing to do with anybody's forget set: general knowledge, without people, in our own words."""

from __future__ import annotations

from msa_lite.data import Row

_TEXTS = (
    "Water boils at a lower temperature on a mountain than at the coast, because the air presses less on its surface. "
    "Beans therefore take longer to cook in a hut near the summit.",
    "A triangle has three angles, and in a plane they add up to a straight line. On a globe they add up to more. The "
    "larger the triangle, the larger the surplus.",
    "Bread rises because yeast eats sugar and gives off gas. The gas is caught in a net of gluten. In the heat of the "
    "oven the bubbles grow once more, and then the crumb sets.",
    "Tides follow the moon. Most coasts see high water twice a day, about fifty minutes later each day. At full moon "
    "and at new moon the sun helps, and the range is largest.",
    "Iron rusts where both water and oxygen reach it. Paint keeps them away. Zinc does more: it corrodes first, and "
    "the iron below a scratch stays bright.",
    "A bicycle stays upright more easily when it is moving. If it leans to the left, the front wheel turns to the "
    "left, and the wheels come back under the rider.",
    "Glass is made of sand, soda and lime, melted together. It must cool slowly, or the outside shrinks before the "
    "inside does, and the piece cracks days later.",
    "Leaves look green because they take in red and blue light and send back the rest. In autumn the green pigment "
    "breaks down first, and yellow that was there all summer shows.",
    "A prime number has no divisors but one and itself. There are infinitely many of them. Two is the only even one, "
    "since every other even number can be halved.",
    "Sound needs something to travel through. It is about four times as fast in water as in air, and faster still in "
    "steel. In empty space nobody hears anything.",
    "Bees dance on the comb to tell others where flowers are. The angle of the dance stands for the direction, and "
    "its length for the distance.",
    "Soap has two ends. One likes water, the other likes fat. The molecules gather around a drop of grease with the "
    "fat end inside, and the drop can be washed away.",
    "Rivers carry most sand in floods. Where the current slows down, the sand settles, so that a river on flat land "
    "builds its own banks and sometimes leaves them for a new bed.",
    "A violin string sounds higher when it is shorter, thinner or tighter. Half the length gives a tone an octave "
    "higher, which is twice the frequency.",
    "Salt lowers the freezing point of water. That is why roads are salted in winter, and why the sea freezes later "
    "than a lake beside it. In deep cold it helps no longer.",
    "A lever trades force for distance. With an arm three times as long, a third of the force is enough, but the hand "
    "has to move three times as far.",
    "Clouds are made of droplets so small that they hardly fall. They grow by running into one another. When they are "
    "large enough, they drop out of the cloud as rain.",
    "Paper is made of fibres of wood that lie in all directions. It tears more easily along the direction in which "
    "the pulp flowed onto the sieve.",
    "Magnets have two poles. If one is cut in half, each half has two poles again. Heat destroys the order inside, "
    "and a hot magnet holds nothing.",
    "Cheese begins as milk that is made to curdle. The curd is cut, drained and salted. Holes come from bacteria that "
    "give off gas while the wheel ripens in the cellar.",
    "A compass points to the magnetic pole, which is not the pole of the map. The difference depends on the place, and "
    "it changes a little from year to year.",
    "Concrete does not dry, it sets: cement and water form crystals that lock the gravel in place. It can do so under "
    "water, and it goes on getting harder for years.",
    "Cats see well at dusk because a layer behind the retina sends the light through it a second time. That layer is "
    "what shines when a lamp meets their eyes.",
    "To find the area of a circle, square its radius and multiply by a little more than three. A circle of twice the "
    "radius therefore has four times the area.",
)

UNRELATED = tuple(Row(index, text=text) for index, text in enumerate(_TEXTS))
