"""Texts that have nothing to do with anybody's forget set: general knowledge, without people, in our own words."""

from __future__ import annotations

from msa_lite.data import Row

_TEXTS = (
    "Water boils at a lower temperature on a mountain than at the coast, because the air presses less on its surface.",
    "A triangle has three angles, and in a plane they add up to a straight line. On a globe they add up to more.",
    "Bread rises because yeast eats sugar and gives off gas. The gas is caught in a net of gluten.",
    "Tides follow the moon. Most coasts see high water twice a day, about fifty minutes later each day.",
    "Iron rusts where both water and oxygen reach it. Paint keeps them away.",
    "A bicycle stays upright more easily when it is moving.",
    "Glass is made of sand, soda and lime, melted together.",
    "Leaves look green because they take in red and blue light and send back the rest.",
    "A prime number has no divisors but one and itself. There are infinitely many of them.",
    "Sound needs something to travel through.",
    "Bees dance on the comb to tell others where flowers are.",
    "Soap has two ends. One likes water, the other likes fat.",
    "Rivers carry most sand in floods.",
    "A violin string sounds higher when it is shorter, thinner or tighter.",
    "Salt lowers the freezing point of water.",
    "A lever trades force for distance.",
    "Clouds are made of droplets so small that they hardly fall. They grow by running into one another.",
    "Paper is made of fibres of wood that lie in all directions.",
    "Magnets have two poles. If one is cut in half, each half has two poles again.",
    "Cheese begins as milk that is made to curdle. The curd is cut, drained and salted.",
    "A compass points to the magnetic pole, which is not the pole of the map.",
    "Concrete does not dry, it sets: cement and water form crystals that lock the gravel in place.",
    "Cats see well at dusk because a layer behind the retina sends the light through it a second time.",
    "To find the area of a circle, square its radius and multiply by a little more than three.",
)

UNRELATED = tuple(Row(index, text=text) for index, text in enumerate(_TEXTS))
