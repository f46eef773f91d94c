"""The recipe: what a user asks for, as a closed schema, and how it is read.

Nothing below the pipeline knows of this part: stages take plain values.
"""

from msa_lite.recipe.files import find_recipe as find_recipe
from msa_lite.recipe.files import shipped_recipes as shipped_recipes
from msa_lite.recipe.files import title_of as title_of
from msa_lite.recipe.load import dump_recipe as dump_recipe
from msa_lite.recipe.load import load_recipe as load_recipe
from msa_lite.recipe.schema import Data as Data
from msa_lite.recipe.schema import Recipe as Recipe

__all__ = ["Data", "Recipe", "dump_recipe", "find_recipe", "load_recipe", "shipped_recipes", "title_of"]
