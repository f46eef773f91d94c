"""Read recipes: closed schemas that name every fault at once.

Nothing below the pipeline knows of recipes: stages take plain values.
"""

from msa_lite.recipe.files import find_recipe as find_recipe
from msa_lite.recipe.files import shipped_recipes as shipped_recipes
from msa_lite.recipe.files import title_of as title_of
from msa_lite.recipe.inputs import Columns as Columns
from msa_lite.recipe.inputs import Prompt as Prompt
from msa_lite.recipe.load import RecipeSource as RecipeSource
from msa_lite.recipe.load import dump_recipe as dump_recipe
from msa_lite.recipe.load import load_any as load_any
from msa_lite.recipe.load import load_recipe as load_recipe
from msa_lite.recipe.load import load_training as load_training
from msa_lite.recipe.paths import absolute_paths as absolute_paths
from msa_lite.recipe.schema import Data as Data
from msa_lite.recipe.schema import Recipe as Recipe
from msa_lite.recipe.training import TrainingRecipe as TrainingRecipe

__all__ = [
    "Columns",
    "Data",
    "Prompt",
    "Recipe",
    "RecipeSource",
    "TrainingRecipe",
    "absolute_paths",
    "dump_recipe",
    "find_recipe",
    "load_any",
    "load_recipe",
    "load_training",
    "shipped_recipes",
    "title_of",
]
