"""Read recipes: closed schemas that name every fault at once.

Nothing below the pipeline knows of recipes: stages take plain values.
"""

from msa_lite.recipe.files import (
    check_new_file,
    find_recipe,
    recipe_schema,
    shipped_recipes,
    shipped_tables,
    title_of,
    write_with_schema,
)
from msa_lite.recipe.inputs import Data, Demo
from msa_lite.recipe.load import (
    RecipeSource,
    TableSource,
    absolute_paths,
    copy_recipe,
    dump_recipe,
    given_paths,
    load_any,
    load_recipe,
    load_table_recipe,
    load_training,
    moved_paths,
    relative_paths,
    set_key,
)
from msa_lite.recipe.outputs import SETS
from msa_lite.recipe.schema import Recipe
from msa_lite.recipe.table import TableRecipe, overrides_of
from msa_lite.recipe.training import TrainingRecipe
from msa_lite.recipe.words import command_hint, key_hint
